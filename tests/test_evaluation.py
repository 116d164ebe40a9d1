"""Scores equal those of a plain PyTorch scorer on the same weights, item by item."""

import dataclasses
import json
import math
import random

import jax
import jinja2
import numpy as np
import pytest
from evaluation_tools import (
    BYTES,
    CONFIG,
    hellaswag_items,
    models,
    torch_choice,
    torch_log_probs,
    torch_text,
    words,
    write_bin,
    write_core,
    write_jsonl,
)

from gptjax import parallel
from gptjax.data import find_dataset, write_shard
from gptjax.evaluation import (
    EvaluationError,
    Row,
    Scorer,
    core_metric,
    evenly_spaced,
    from_dataset,
    from_file,
    read_core,
    read_hellaswag,
    score_choices,
    score_core,
    score_text,
)
from gptjax.evaluation.core import score_task
from gptjax.models.base import params_of

CLOSE = {"rtol": 2e-6, "atol": 2e-4}  # sums of 100 fp32 log-probabilities
BLOCK = CONFIG.block_size


@pytest.fixture(scope="module")
def both():
    return models()


@pytest.fixture(scope="module")
def scorer(both):
    """Two devices, and batches of a few rows each."""
    return Scorer.of(both[0], batch_tokens=6 * BLOCK)


@pytest.mark.parametrize("form", ["jsonl", "bin"])
def test_hellaswag_equals_pytorch(form, tmp_path, both, scorer):
    items = hellaswag_items(30, seed=2)
    path = tmp_path / f"hellaswag_val.{form}"
    (write_jsonl if form == "jsonl" else write_bin)(path, items)
    found = score_choices(scorer, BYTES, read_hellaswag(path))
    right = right_normed = longest = 0
    for i, item in enumerate(items):
        context = BYTES.encode(item["ctx"])
        endings = [BYTES.encode(" " + ending) for ending in item["endings"]]
        sums, means, best, best_normed = torch_choice(both[1], context, endings)
        np.testing.assert_allclose(found.sums[i], sums, **CLOSE)
        np.testing.assert_allclose(found.means[i], means, **CLOSE)
        assert int(np.argmax(found.sums[i])) == best
        right += best == item["label"]
        right_normed += best_normed == item["label"]
        longest = max(longest, len(context) + max(map(len, endings)))
    assert longest > BLOCK + 1  # some lose their first tokens
    metrics = found.metrics()
    assert (metrics["acc"], metrics["acc_norm"]) == (right / 30, right_normed / 30)
    assert metrics["items"] == 30 and 0 < right < 30 and right != right_normed
    assert metrics["acc_stderr"] == pytest.approx(np.std(np.arange(30) < right, ddof=1) / 30**0.5)


def test_scores_do_not_depend_on_batches_or_devices(both, scorer):
    rng = np.random.default_rng(1)
    rows = []
    for i in range(40):
        length = int(rng.integers(66 if i < 6 else 2, BLOCK + 2))
        rows.append(Row(rng.integers(0, 257, length), int(rng.integers(1, length + 1))))
    likeliest = scorer.score(rows, greedy=True)
    alone = Scorer.of(both[0], jax.devices()[:1], batch_tokens=1).score(rows[:6])
    for i, (row, score) in enumerate(zip(rows, likeliest, strict=True)):
        expected, greedy = torch_log_probs(both[1], row.tokens, row.start)
        np.testing.assert_allclose(score.log_prob, float(expected.sum()), **CLOSE)
        assert score.tokens == len(row.tokens) - row.start
        assert score.greedy == bool(greedy.all())
        if i < len(alone):
            np.testing.assert_allclose(alone[i].log_prob, score.log_prob, **CLOSE)
    # the most probable token after each of some contexts
    context = np.array([7, 3, 9])
    best = max(range(257), key=lambda t: float(torch_log_probs(both[1], [*context, t], 3)[0]))
    found = scorer.score([Row(np.append(context, t), 3) for t in (best, 5)], greedy=True)
    assert [score.greedy for score in found] == [True, False]


def test_sharded_parameters(both, scorer, monkeypatch):
    """Those of a training state, which a run evaluates without a copy."""
    monkeypatch.setattr(parallel, "SMALLEST_SHARDED", 1)
    sharded = parallel.Parallel.of(jax.devices(), "fsdp")
    params = params_of(both[0])
    params = jax.device_put(params, sharded.shardings(params))
    assert params["wte"].addressable_shards[0].data.shape == (132, 32)
    rows = [Row(np.arange(70 + i) * 7 % 257, 3) for i in range(4)]
    found = Scorer(CONFIG, params, sharded, 6 * BLOCK).score(rows)
    for score, expected in zip(found, scorer.score(rows), strict=True):
        np.testing.assert_allclose(score.log_prob, expected.log_prob, **CLOSE)


def test_rows_that_cannot_be_scored(scorer):
    rows = [Row(np.arange(3), 0), Row(np.arange(3), 4), Row(np.zeros(BLOCK + 5, int), 2)]
    message = f"at least one token before at most {BLOCK} scored tokens"
    vocabulary = r"\[0, 257\), the model's vocabulary, got 257"
    for row, says in [*((row, message) for row in rows), (Row(np.array([1, 257]), 1), vocabulary)]:
        with pytest.raises(EvaluationError, match=says):
            scorer.score([row])


@pytest.mark.parametrize("stride", [None, 30])
def test_every_token_of_a_text_is_scored_once(stride, tmp_path, both, scorer):
    text = words(np.random.default_rng(3), 60)
    (tmp_path / "text.txt").write_text(text, newline="")
    stream = from_file(tmp_path / "text.txt", BYTES)
    found = score_text(scorer, stream, stride=stride)
    nats = -torch_text(both[1], [BYTES.eot, *text.encode()], stride or BLOCK).sum()
    assert found.tokens == found.bytes == len(text.encode()) > 3 * BLOCK
    assert found.nats == pytest.approx(nats, rel=1e-6)
    assert found.loss == found.nats / found.tokens
    assert found.bits_per_byte == pytest.approx(found.nats / math.log(2) / len(text.encode()))
    first = score_text(scorer, stream, stride=stride, max_tokens=100)
    assert first.tokens == 100 and first.nats < nats


def test_validation_shards(tmp_path, both, scorer):
    """The tokens of all shards as one stream; end-of-text is not part of the bits per byte."""
    texts = [words(np.random.default_rng(seed), 20) for seed in range(3)]
    documents = [np.array([256, *text.encode()], np.uint16) for text in texts]
    write_shard(tmp_path / "x_train_000001.bin", documents[0])
    write_shard(tmp_path / "x_val_000000.bin", np.concatenate(documents[:2]))
    write_shard(tmp_path / "x_val_000001.bin", documents[2])
    shards = {
        path.name: {"tokens": (path.stat().st_size - 1024) // 2, "max_token": 256}
        for path in tmp_path.glob("*.bin")
    }
    about = {"format": 1, "tokenizer": "byte", "vocab_size": 257, "eot": 256, "source": "test"}
    (tmp_path / "dataset.json").write_text(json.dumps(about | {"shards": shards}))
    dataset = find_dataset(str(tmp_path), tmp_path, "byte")
    found = score_text(scorer, from_dataset(dataset, BYTES))
    ids = np.concatenate([[256], *documents])
    losses = -torch_text(both[1], ids)
    assert found.tokens == len(ids) - 1
    assert found.bytes == sum(len(text.encode()) for text in texts) == found.tokens - 3
    assert found.bits_per_byte == pytest.approx(found.text_nats / math.log(2) / found.bytes)
    assert found.nats == pytest.approx(losses.sum(), rel=1e-6)
    assert found.text_nats == pytest.approx(losses[ids[1:] != 256].sum())
    assert found.text_nats < found.nats - 1
    with pytest.raises(EvaluationError, match="found loss masks"):
        from_dataset(dataclasses.replace(dataset, masked=True), BYTES)


# Whole prompts, as a template of a template engine writes them.
TEMPLATES = {
    "choices": "{% for e in shots %}{{ e.query }}{{ d }}{{ e.choices[e.gold] }}\n\n{% endfor %}"
    "{{ item.query }}{{ d }}{{ option }}",
    "winograd": "{{ option }}{{ d }}{{ item.continuation }}",
    "lambada": "{% for e in shots %}{{ e.context | trim }}{{ d }}{{ e.continuation }}\n\n"
    "{% endfor %}{{ item.context | trim }}{{ d }}{{ option }}",
}


def core_by_hand(model, label, items, shots, delimiter):
    """Whether PyTorch is right for each item, from the files of the bundle."""
    random.Random(1337).shuffle(items)
    right = []
    for index, item in enumerate(items):
        others = [i for i in range(len(items)) if i != index]
        chosen = random.Random(1234 + index).sample(others, shots)
        values = {"shots": [items[i] for i in chosen], "item": item, "d": delimiter}
        options = item.get("choices") or item.get("context_options") or ["", item["continuation"]]
        template = jinja2.Template(TEMPLATES[label])
        prompts = [template.render(option=option, **values) for option in options]
        if label == "lambada":
            prompts[0] = prompts[0].strip()
        ids = [[256, *prompt.encode()] for prompt in prompts]
        ends = ids if label != "winograd" else [each[::-1] for each in ids]
        common = 0
        while len({tuple(each[: common + 1]) for each in ends}) == 1:
            common += 1
        means = []
        for each in ids:
            start = len(each) - common if label == "winograd" else common
            crop = max(0, len(each) - BLOCK)
            found, greedy = torch_log_probs(model, each[crop:], start - crop)
            means.append(float(-found.mean()))
        if label == "lambada":
            right.append(bool(greedy.all()))
        else:
            right.append(means.index(min(means)) == item["gold"])
    return right


def test_core_equals_pytorch(tmp_path, both, scorer):
    write_core(tmp_path, 16)
    tasks = read_core(tmp_path)
    assert [(task.label, task.shots, task.baseline) for task in tasks] == [
        ("choices", 2, 0.25),
        ("winograd", 0, 0.5),
        ("lambada", 1, 0.0),
    ]
    results, centred = score_core(scorer, BYTES, tasks), []
    for task in tasks:
        lines = (tmp_path / "eval_data" / "some" / f"{task.label}.jsonl").read_text().splitlines()
        items = [json.loads(line) for line in lines]
        expected = core_by_hand(both[1], task.label, items, task.shots, task.delimiter)
        assert score_task(scorer, BYTES, task, 16) == expected
        accuracy = sum(expected) / 16
        assert results[task.label]["acc"] == accuracy
        centred.append((accuracy - task.baseline) / (1 - task.baseline))
        assert results[task.label]["centred"] == centred[-1]
        assert 0 < accuracy < 1 or task.label == "lambada"
    assert core_metric(results) == pytest.approx(np.mean(centred))
    assert max(len(p) for i in range(16) for p in tasks[0].prompts(i)) > BLOCK  # some are cropped


def edited(**fields):
    return json.dumps(hellaswag_items(1)[0] | fields)


JSONL = [
    (f"{edited()}\n\n{{", r"val\.jsonl, line 3: malformed: JSONDecodeError: "),
    (f"{edited()}\n[]", "line 2: malformed"),
    (edited(label="3"), "line 1: malformed: TypeError: list indices must be integers"),
    (edited(label=4), "line 1: malformed: IndexError"),
    ("", "found an empty file"),
    (None, "No such file or directory; https://.*hellaswag_val.jsonl is the published file"),
]
BIN = [
    (lambda b: b[:100], r"val\.bin: malformed: ValueError: "),
    (lambda b: b"\0\0\0\0" + b[4:], "expected magic 20240522 and version 1 .*, found 0 and 1"),
    (lambda b: b[:1400], r"val\.bin: malformed: "),
    (lambda b: b[:-2], r"expected 2 examples of \d+ bytes, found"),
]


@pytest.mark.parametrize(("change", "message"), JSONL + BIN)
def test_malformed_hellaswag(change, message, tmp_path):
    path = tmp_path / f"hellaswag_val.{'bin' if callable(change) else 'jsonl'}"
    if callable(change):
        write_bin(path, hellaswag_items(2))
        path.write_bytes(change(path.read_bytes()))
    elif change is not None:
        path.write_text(change)
    with pytest.raises(EvaluationError, match=message):
        read_hellaswag(path)


CHOICES, CSV, YAML = "eval_data/some/choices.jsonl", "eval_meta_data.csv", "core.yaml"


@pytest.mark.parametrize(
    "file, old, new, message",
    [
        (YAML, "icl_tasks:", "tasks:", "core.yaml: malformed: KeyError: 'icl_tasks'"),
        (YAML, "- label: choices", "- label: [", "core.yaml: malformed: ParserError: while"),
        (YAML, "schema", "scheme", "expected icl_task_type to be one of .*, found 'scheme'"),
        (YAML, "[2]", "2", "core.yaml: malformed: TypeError"),
        (YAML, "some/lambada", "lambada", "No such file or directory; it is part of"),
        (CSV, "50.0", "much", "eval_meta_data.csv: malformed: ValueError: could not convert"),
        (CSV, "lambada,x", "\udcff", "malformed: UnicodeDecodeError"),
        (CHOICES, '"gold"', '"gild"', "line 1: malformed: KeyError: 'gold'"),
        (CHOICES, '"gold": ', '"gold": 4', "malformed: IndexError"),
    ],
)
def test_malformed_core(file, old, new, message, tmp_path):
    write_core(tmp_path, 16)
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new), errors="surrogateescape")
    with pytest.raises(EvaluationError, match=message):
        read_core(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file or directory; expected a text file"),
        (b"ab\xff", "text.txt: malformed: UnicodeDecodeError: .* byte 0xff in position 2"),
        (b"", f"at least 1 and at most .* {BLOCK}, got 81"),
    ],
)
def test_malformed_texts(content, message, tmp_path, scorer):
    if content is not None:
        (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(EvaluationError, match=message):
        score_text(scorer, from_file(tmp_path / "text.txt", BYTES), stride=BLOCK + 1)


def test_a_subset_is_evenly_spaced():
    assert evenly_spaced(range(10), 3) == [0, 3, 6]
    assert evenly_spaced(range(3), 5) == evenly_spaced(range(3), None) == [0, 1, 2]
