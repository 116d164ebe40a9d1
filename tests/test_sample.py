"""python -m gptjax.sample: the tokens of `generate`, streamed text, stop texts, prompts, errors."""

import inspect
import io
import itertools
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from saved_run_tools import random_params, save_run

from gptjax import (
    GPT2,
    GPT2Config,
    cli,
    devices,
    evaluate,
    generate,
    generation,
    load,
    model_options,
    sample,
)
from gptjax.data import get_tokenizer
from gptjax.generation import NO_TOKEN
from gptjax.generation.stream import Completion, complete, token_chunks

CONFIG = GPT2Config(
    vocab_size=257, padded_vocab_size=264, block_size=24, n_layer=1, n_head=2, n_embd=16
)
BYTES = get_tokenizer("byte")
KEY = jax.random.key(0)
SIX = ["--max-new-tokens", 6, "--no-stop-at-eot"]


def varied(params):
    """Parameters whose likeliest token depends on the whole prompt."""
    wanted = {"scale": jnp.ones_like, "bias": jnp.zeros_like}
    change = lambda path, p: wanted.get(path[-1].key, lambda p: p)(p)
    return jax.tree_util.tree_map_with_path(change, params)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    params = {3: varied(random_params(CONFIG, 1)), 6: varied(random_params(CONFIG))}
    return save_run(tmp_path_factory.mktemp("sample") / "run", params, model=CONFIG)


@pytest.fixture(scope="module")
def model(run):
    return load(run).model


@pytest.fixture
def command(run, monkeypatch, capsys):
    """Run the command without a cache; return exit code, output and errors."""
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:1], None))
    monkeypatch.setattr(model_options, "cache_folder", lambda: None)

    def call(*arguments, path=run, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = sample.main([str(path), *map(str, arguments)])
        return code, *capsys.readouterr()

    return call


@pytest.mark.parametrize("option", ["--prompt", "--stop"])
def test_an_empty_text_is_refused(command, option):
    code, shown, errors = command("--max-new-tokens", 1, option, "")
    assert code == 1 and not shown and "empty" in errors and "Traceback" not in errors


def drawn(model, prompts, count, **options):
    """New tokens of each prompt, by `generate`."""
    lengths_B = np.array([len(prompt) for prompt in prompts])
    prompt_BT = np.array([[*prompt] + [0] * (lengths_B.max() - len(prompt)) for prompt in prompts])
    options.setdefault("key", jax.random.key(0))
    out_BT = generate(model, prompt_BT, lengths_B=lengths_B, max_new_tokens=count, **options)
    rows = zip(lengths_B, np.asarray(out_BT).tolist(), strict=True)
    return [row[length : length + count] for length, row in rows]


# ---------------------------------------------------------------------------------- tokens, texts
def test_chunks_are_the_tokens_of_generate(model):
    lengths_B, prompt_BT = np.array([5, 9, 2, 7]), np.arange(36).reshape(4, 9)
    how = {"max_new_tokens": 6, "temperature": 0.8, "key": jax.random.key(3)}
    chunks = [*token_chunks(model, prompt_BT, lengths_B=lengths_B, steps=4, **how)]
    assert [chunk.shape for chunk in chunks] == [(4, 1), (4, 4), (4, 1)]
    prompts = [row[:length] for row, length in zip(prompt_BT, lengths_B, strict=True)]
    expected_BN = drawn(model, prompts, 6, temperature=0.8, key=jax.random.key(3))
    np.testing.assert_array_equal(np.concatenate(chunks, axis=1), expected_BN)


def test_a_row_ends_at_block_size(model):
    prompt_BT, how = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]]), {"temperature": 0, "key": KEY}
    lengths_B = np.array([3, 5])
    chunks = token_chunks(model, prompt_BT, max_new_tokens=30, lengths_B=lengths_B, **how)
    new_BN = np.concatenate([*chunks], axis=1)
    assert new_BN.shape == (2, 21) and (new_BN[1, 19:] == NO_TOKEN).all()
    assert (new_BN[0] >= 0).all() and (new_BN[1, :19] >= 0).all()


def grown(ids, limit=100, **how):
    """A completion of given ids, and its text after each."""
    completion, texts = Completion(BYTES, (limit, "max-new-tokens"), **how), []
    for token in ids:
        if completion.stopped is None:
            completion.append(token)
            texts.append(completion.text)
    return completion, texts


def test_a_text_only_grows_and_ends_as_decode():
    ids = [*"é€😀".encode()] + [0xFF, 0xE2, 0x82]
    completion, texts = grown(ids, limit=len(ids))
    assert texts[:9] == ["", "é", "é", "é", "é€", "é€", "é€", "é€", "é€😀"]
    assert completion.text == BYTES.decode(ids) == "é€😀\ufffd\ufffd"
    rng = np.random.default_rng(0)
    ids = [int(i) for i in rng.choice([97, 98, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 256], 60)]
    completion, more = grown(ids, limit=60, stop=("aba!", "b€"), stop_at_eot=False)
    cut, whole = completion.text, BYTES.decode(completion.tokens)
    assert whole.startswith(cut) and (cut == whole or whole[len(cut) :].startswith("b€"))
    for some in (texts, more):
        assert all(text.startswith(before) for before, text in itertools.pairwise(some))


@pytest.mark.parametrize(
    "ids, how, text, tokens, stopped",
    [
        (b"one, two", {"stop": [", t"]}, "one", 6, "stop-text"),
        (b"aab", {"stop": ["ab", "aab"]}, "", 3, "stop-text"),
        (b"one", {"stop": ["never"]}, "one", 3, "max-new-tokens"),
        ([97, 256, 98], {}, "a", 2, "end-of-text"),
        ([97, 256, 98], {"stop_at_eot": False}, "a<|endoftext|>b", 3, "max-new-tokens"),
        ([97, 263, 98], {}, "ab", 3, "max-new-tokens"),
    ],
)
def test_ends(ids, how, text, tokens, stopped):
    completion, _ = grown(ids, limit=len(ids), **how)
    found = completion.text, len(completion.tokens), completion.stopped
    assert found == (text, tokens, stopped)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"stop": "END"}, "expected a list of texts .*, got 'END'"),
        ({"stop": ["END", ""]}, "expected a list of texts that are not empty"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"prompts": ["hello"]}, "complete: expected prompts of token ids"),
        ({"prompts": [[1, 2], np.array([2**32 + 65])]}, "prompt ids must lie in .*4294967361"),
        ({"prompts": [np.array([1]), np.zeros(0, int)]}, "expected lengths_B .* from 1"),
    ],
    ids=repr,
)
def test_wrong_arguments_of_complete_are_named(model, change, message):
    unchecked = inspect.unwrap(complete)  # outside pytest, no annotation is checked
    options = {"prompts": [[1, 2]], "max_new_tokens": 4, "key": KEY} | change
    with pytest.raises(ValueError, match=message):
        next(unchecked(model, BYTES, **options))


def test_the_device_computes_the_next_chunk_while_one_is_used(model, monkeypatch):
    started, advance = [], generation._advance
    call = lambda *args, **options: started.append(1) or advance(*args, **options)
    monkeypatch.setattr(generation, "_advance", call)
    how = {"max_new_tokens": 6, "steps": 2, "key": KEY}
    # The launch of the second chunk must not delay the first token.
    assert [len(started) for _ in token_chunks(model, np.array([[1, 2]]), **how)] == [0, 2, 3, 3]


# ------------------------------------------------------------------------------------- the command
def test_one_prompt_is_streamed(command, model, monkeypatch):
    (ids,) = drawn(model, [b"hello"], 6)
    written = []
    monkeypatch.setattr(sample, "printable", lambda text: written.append(text) or text)
    monkeypatch.setattr(sample, "STREAMED", 2)
    code, shown, errors = command("--prompt", "hello", *SIX)
    assert (code, shown) == (0, f"hello{BYTES.decode(ids)}\n") and "fp32" in errors
    assert len(written) > 3  # the text came in parts


def test_control_characters_are_replaced(command, monkeypatch):
    monkeypatch.setattr(BYTES.__class__, "decode", lambda self, ids: "\x1b[2J" * len(ids))
    code, shown, _ = command("--prompt", "x", *SIX)
    assert (code, shown) == (0, "x" + "\ufffd[2J" * 6 + "\n")


def test_json_of_several_prompts_and_samples(command, model):
    code, shown, errors = command("--prompt", "abc", "z", "--num-samples", 2, "--json", *SIX)
    assert code == 0, errors
    found = [json.loads(line) for line in shown.splitlines()]
    ids = drawn(model, [b"abc", b"abc", b"z", b"z"], 6)
    named = zip(("abc", "abc", "z", "z"), (1, 2, 1, 2), ids, strict=True)
    assert found == [
        dict(prompt=prompt, sample=n, text=BYTES.decode(row), tokens=row, stop="max-new-tokens")
        for prompt, n, row in named
    ]
    assert ids[0] != ids[1]
    # Without a prompt a text follows the end of text; another batch has another key, and a seed
    # means the same whatever JAX's default generator is.
    with jax.default_prng_impl("rbg"):
        code, shown, _ = command("--json", *SIX)
    assert code == 0 and [json.loads(shown)["tokens"]] == drawn(model, [[256]], 6)
    how = ["--batch-size", 4, "--seed", 5, "--json", *SIX]
    found = [json.loads(line) for line in command("--prompt", *"abcda", *how)[1].splitlines()]
    expected = drawn(model, [b"a", b"b", b"c", b"d"], 6, key=jax.random.key(5))
    assert [row["tokens"] for row in found[:4]] == expected
    assert [row["prompt"] for row in found] == [*"abcda"]
    assert found[4]["tokens"] != found[0]["tokens"]


def test_headers_and_files(command, tmp_path, model):
    texts, files = ("one", "two\nlines"), [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, texts, strict=True):
        file.write_text(f"{text}\n")
    how = ["--max-new-tokens", 30, "--temperature", 0, "--no-stop-at-eot"]
    code, shown, errors = command("--prompt-file", *files, *how)
    assert code == 0, errors
    assert shown.startswith('--- prompt 1, sample 1: "one", stopped by block-size\n')
    assert '\n--- prompt 2, sample 1: "two\\nlines", stopped by block-size\n' in shown
    ids = drawn(model, [text.encode() for text in texts], 15, temperature=0)
    assert shown.endswith(f"{sample.printable(BYTES.decode(ids[1]))}\n")
    code, shown, _ = command("--prompt-file", "-", "--json", *how, stdin="two\r\nlines")
    assert json.loads(shown)["tokens"] == ids[1]


def test_step_and_precision(command, run, model):
    how = ["--prompt", "x", "--json", "--max-new-tokens", 1, "--temperature", 0]
    code, shown, errors = command(*how, "--step", 3, "--precision", "bf16")
    older = load(run, step=3).model
    expected = [drawn(each, [b"x"], 1, temperature=0) for each in (older, model)]
    assert code == 0 and "bf16" in errors and expected[0] != expected[1]
    assert [json.loads(shown)["tokens"]] == expected[0]


OWN_MODEL = """
import dataclasses
from gptjax import GPT2, Config, GPT2Config

class OwnConfig(GPT2Config):
    def build(self, rngs):
        return Own(self, rngs=rngs)

class Own(GPT2):
    pass

model = OwnConfig(
    vocab_size=257, padded_vocab_size=264, block_size=24, n_layer=1, n_head=2, n_embd=16
)
config = Config(model=model, sequence_length=24, batch_tokens=1536)
"""


def test_a_model_of_a_config_file(command, tmp_path, monkeypatch):
    file, run = tmp_path / "own.py", tmp_path / "run"
    file.write_text(OWN_MODEL)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    model = cli.load(file).model
    save_run(run, {1: random_params(model)}, model=model)
    del sys.modules["_config_own"]

    how = ["--prompt", "x", "--max-new-tokens", 1]
    code, _, errors = command(*how, path=run)
    assert code == 1 and "found OwnConfig" in errors and "--config FILE" in errors
    code, shown, _ = command(*how, "--config", file, path=run)
    assert code == 0 and shown
    del sys.modules["_config_own"]
    found, tokenizer = evaluate.Evaluate(path=run, config=file).load()
    assert type(found).__name__ == "Own" and tokenizer.name == "byte"


def test_a_subclass_is_not_decoded_by_the_kernel_of_gpt2(model, monkeypatch):
    class Changed(GPT2):
        pass

    monkeypatch.setattr("gptjax.models.gpt2.select", lambda *_, **__: "triton")
    assert model.decode_kernel(1) == "triton"
    changed = Changed(CONFIG, rngs=nnx.Rngs(0))
    assert changed.decode_kernel(1) == "xla"
    with pytest.raises(ValueError, match="auto or xla for generation, got 'triton'"):
        changed.decode_kernel(1, "triton")
