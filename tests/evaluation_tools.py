"""A small model with its PyTorch reference, and made-up files of the published forms."""

import json

import numpy as np
import torch
from gpt2_tools import build, random_of
from reference.torch_gpt2 import from_params

from gptjax import GPT2Config
from gptjax.data import get_tokenizer
from gptjax.evaluation.choices import BIN_MAGIC

CONFIG = GPT2Config(
    vocab_size=257, padded_vocab_size=264, block_size=80, n_layer=2, n_head=2, n_embd=32
)
BYTES = get_tokenizer("byte")


def models():
    """A model of ours, and PyTorch's with the same random weights."""
    params = random_of(CONFIG)
    return build(CONFIG, params), from_params(CONFIG, params)


def torch_log_probs(model, tokens, start):
    """Log-probabilities of tokens[start:], and whether each is the likeliest: one row at a time."""
    with torch.no_grad():
        ids = torch.tensor(np.asarray(tokens, np.int64))
        log_probs = torch.log_softmax(model(ids[None, :-1])[0], dim=-1)
        chosen = log_probs.gather(-1, ids[1:, None])[:, 0]
        return chosen[start - 1 :], (log_probs.argmax(-1) == ids[1:])[start - 1 :]


def torch_choice(model, context, endings):
    """Sum and mean of the log-probabilities of each ending, and the best ending by either."""
    sums, means = [], []
    for ending in endings:
        ids = [*context, *ending]
        crop = max(0, len(ids) - CONFIG.block_size - 1)
        found, _ = torch_log_probs(model, ids[crop:], len(context) - crop)
        sums.append(float(found.sum()))
        means.append(float(found.mean()))
    return sums, means, int(np.argmax(sums)), int(np.argmax(means))


def words(rng, count):
    return " ".join("".join(rng.choice(list("abcdeé"), rng.integers(1, 7))) for _ in range(count))


def hellaswag_items(count, seed=0):
    rng = np.random.default_rng(seed)
    items = []
    for _ in range(count):
        context = f"{words(rng, rng.integers(1, 14))} {words(rng, 1)}"
        item = {"ctx": context, "label": int(rng.integers(4))}
        items.append(item | {"endings": [words(rng, rng.integers(1, 6)) for _ in range(4)]})
    return items


def write_jsonl(path, items):
    path.write_text("".join(json.dumps(item) + "\n" for item in items))


def write_bin(path, items):
    """llm.c's form of the same questions."""
    stream = []
    for index, item in enumerate(items):
        example = [65535, 0, index, item["label"], len(item["endings"])]
        for text in (item["ctx"], *(f" {ending}" for ending in item["endings"])):
            ids = BYTES.encode(text).tolist()
            example += [len(ids), *ids]
        example[1] = 2 * len(example)
        stream += example
    header = np.zeros(256, "<i4")
    header[:3] = BIN_MAGIC, 1, len(items)
    path.write_bytes(header.tobytes() + np.array(stream, "<u2").tobytes())


CORE_YAML = """
icl_tasks:
- label: choices
  dataset_uri: some/choices.jsonl
  num_fewshot: [2]
  icl_task_type: multiple_choice
  continuation_delimiter: "\\nAnswer: "
- label: winograd
  dataset_uri: some/winograd.jsonl
  num_fewshot: [0]
  icl_task_type: schema
- label: lambada
  dataset_uri: some/lambada.jsonl
  num_fewshot: [1]
  icl_task_type: language_modeling
"""


def write_core(folder, count, seed=0):
    """A bundle of three tasks."""
    rng = np.random.default_rng(seed)
    (folder / "eval_data" / "some").mkdir(parents=True)
    (folder / "core.yaml").write_text(CORE_YAML)
    (folder / "eval_meta_data.csv").write_text(
        "Eval Task,Task Category,Random baseline\nchoices,x,25\nwinograd,x,50.0\nlambada,x,0\n"
    )
    gold = lambda choices: int(rng.integers(choices))
    choices = [
        {"query": words(rng, 2), "gold": gold(4)}
        | {"choices": [words(rng, rng.integers(1, 3)) for _ in range(4)]}
        for _ in range(count)
    ]
    # the first choice begins the second: after their common prefix it has no tokens
    choices[0] |= {"choices": [choices[0]["choices"][0] + end for end in ("", "x")], "gold": 0}
    winograd = [
        {"context_options": [words(rng, 3), words(rng, 4)], "continuation": words(rng, 2)}
        | {"gold": gold(2)}
        for _ in range(count)
    ]
    lambada = [
        {"context": f" {words(rng, 4)} ", "continuation": words(rng, 1)[:1]} for _ in range(count)
    ]
    for name, items in {"choices": choices, "winograd": winograd, "lambada": lambada}.items():
        write_jsonl(folder / "eval_data" / "some" / f"{name}.jsonl", items)


def torch_text(model, ids, stride=CONFIG.block_size):
    """Log-probabilities of ids[1:], `stride` new ones from each window of block_size tokens."""
    found = []
    for begin in range(1, len(ids), stride):
        end = min(begin + stride, len(ids))
        first = max(0, end - CONFIG.block_size - 1)
        found += torch_log_probs(model, ids[first:end], begin - first)[0].tolist()
    return np.array(found)
