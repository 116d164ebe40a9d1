"""Packed documents: the windows equal those of a packer in plain Python, in one order for all
processes, and in runs that change their lengths and resume."""

import dataclasses
import itertools
import json
import shutil
import tempfile
from pathlib import Path

import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from dataset_tools import tokens_of
from hypothesis import given, settings
from train_tools import rows, run, same_as

from gptjax.config import Config, ConfigError, Stage
from gptjax.data import (
    Loader,
    Packing,
    ShardError,
    Stretch,
    Windows,
    fixed_batches,
    write_shard,
)
from gptjax.timeline import Timeline
from gptjax.training import header
from gptjax.training.inputs import Inputs

EOT, VOCAB = 60_000, 60_001


def write_documents(folder, lengths, *, before=0, cuts=()):
    """Write documents of these lengths to shards that end at `cuts`; return paths and tokens.

    All tokens but the EOTs differ, so that a window's tokens name their positions. `before` tokens
    precede the first EOT.
    """
    tokens = np.arange(before + sum(lengths), dtype=np.uint16)
    tokens[before + np.cumsum([0, *lengths[:-1]])] = EOT
    bounds = sorted({0, len(tokens), *(cut for cut in cuts if 0 < cut < len(tokens))})
    paths = []
    for number, (begin, end) in enumerate(zip(bounds, bounds[1:], strict=False), start=1):
        paths.append(Path(folder) / f"documents_train_{number:06d}.bin")
        write_shard(paths[-1], tokens[begin:end])
    return paths, tokens


def split(tokens, eot=EOT):
    return np.split(tokens, np.flatnonzero(tokens == eot))[1:]


def window_from(documents, i, length, maximum):
    """Return the window that begins with document `i`, or None, and the document after it."""
    window = []
    while len(window) <= length and i < len(documents):
        window, i = window + documents[i][:maximum].tolist(), i + 1
    return (window[: length + 1] if len(window) > length else None), i


def pack(tokens, *lengths, eot=EOT):
    """Return the windows of `length` + 1 tokens."""
    documents, windows, i = split(tokens, eot), [], 0
    while window := (found := window_from(documents, i, *lengths))[0]:
        windows.append(window)
        i = found[1]
    return windows


def check_windows(windows, expected):
    """Check tokens and documents: a document begins at each EOT."""
    found = [windows[i] for i in range(len(windows))]
    assert [tokens_of(batch).tolist() for batch in found] == expected
    for batch in found:
        begins = np.flatnonzero(batch.inputs == EOT)
        np.testing.assert_array_equal(np.flatnonzero(np.diff(batch.segments, prepend=0)), begins)


@given(
    lengths=st.lists(
        st.one_of(st.just(1), st.integers(1, 6), st.integers(7, 40)), min_size=1, max_size=25
    ),
    before=st.integers(0, 9),
    cuts=st.lists(st.integers(1, 200), max_size=3),
    length=st.integers(1, 24),
    maximum=st.integers(1, 30),
)
@settings(max_examples=60, deadline=None)
def test_windows_are_those_of_a_plain_packer(lengths, before, cuts, length, maximum):
    with tempfile.TemporaryDirectory() as folder:
        paths, tokens = write_documents(folder, lengths, before=before, cuts=cuts)
        expected, packing = pack(tokens, length, maximum), Packing(EOT, maximum)
        if not expected:
            with pytest.raises(ShardError, match=rf"at least {length + 1} tokens"):
                Windows(paths, length, VOCAB, packing=packing)
            return
        windows = Windows(paths, length, VOCAB, packing=packing)
        check_windows(windows, expected)
        with pytest.raises(IndexError):
            windows[len(windows)]
    assert all(window[0] == EOT for window in expected)
    for window in map(np.array, expected):
        documents = np.split(window, np.flatnonzero(window == EOT))
        assert not documents[0].size and max(map(len, documents)) <= maximum


def test_masks_of_packed_windows(tmp_path):
    paths, tokens = write_documents(tmp_path, [5, 9, 3, 12], cuts=[11])
    counts = np.random.default_rng(0).integers(0, 2, len(tokens), np.uint8)
    write_shard(paths[0].with_suffix(".mask"), counts[:11])
    write_shard(paths[1].with_suffix(".mask"), counts[11:])
    packing = Packing(EOT, 6)
    batch = Windows(paths, 7, VOCAB, packing=packing)[1]
    at = np.array([14, 15, 16, 17, 18, 19, 20, 21])  # the third document, five tokens of the last
    np.testing.assert_array_equal(batch.inputs, tokens[at[:-1]])
    expected = np.where(counts[at[1:]], tokens[at[1:]].astype(np.int32), -1)
    np.testing.assert_array_equal(batch.targets, expected)
    assert (expected == -1).any() and (expected >= 0).any()


def take(paths, steps, batch=4, **options):
    options = {"sequence_length": 10, "seed": 3, "packing": Packing(EOT, 7)} | options
    with Loader(paths, batch=batch, vocab_size=VOCAB, **options) as loader:
        return np.stack([tokens_of(next(loader)) for _ in range(steps)])


def test_the_loader_shuffles_packed_windows(tmp_path):
    """test_loader.py has processes, starts and epochs."""
    lengths = np.random.default_rng(0).integers(1, 20, 100).tolist()
    paths, tokens = write_documents(tmp_path, lengths, cuts=[300])
    expected = [tuple(window) for window in pack(tokens, 10, 7)]
    first = [tuple(window) for window in take(paths, len(expected) // 4).reshape(-1, 11).tolist()]
    assert len({*first}) == len(first) and {*first} <= {*expected}
    assert first != expected[: len(first)]


def test_text_without_documents_is_refused(tmp_path):
    paths, _ = write_documents(tmp_path, [40])
    with pytest.raises(ShardError, match="that begin with the end-of-text token 7000, found no"):
        Loader(
            paths, sequence_length=4, batch=1, seed=0, vocab_size=VOCAB, packing=Packing(7000, 8)
        )


# ------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="session")
def books(words, tmp_path_factory):
    """The corpus `words` in documents of 1 to 80 tokens."""
    folder = tmp_path_factory.mktemp("books")
    rng = np.random.default_rng(1)
    for path in words.glob("*.bin"):
        tokens = np.fromfile(path, "<u2", offset=1024)
        begins = np.cumsum(rng.integers(1, 80, len(tokens)))
        tokens[[0, *begins[begins < len(tokens)]]] = 256
        write_shard(folder / path.name, tokens)
    manifest = json.loads((words / "dataset.json").read_text())
    for shard in manifest["shards"].values():
        shard["max_token"] = 256
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


# Steps 0–1, steps 2–3 of longer documents, and steps 4–5 of shorter sequences.
STAGES = (
    Stage(until=2, max_document_length=12),
    Stage(until=4),
    Stage(sequence_length=16, micro_batch=8),
)


@pytest.fixture
def packed(config, books):
    return dataclasses.replace(
        config,
        dataset=str(books),
        optimizer=dataclasses.replace(config.optimizer, schedule_steps=20),
        separate_documents=True,
        max_document_length=40,
        stages=STAGES,
        max_steps=6,
        val_every=0,
        sample_every=0,
        checkpoint_every=0,
    )


@pytest.mark.parametrize("data_order", ["shuffled", "sequential"])
def test_a_run_whose_lengths_change_resumes_bit_for_bit(data_order, packed, monkeypatch):
    packed = dataclasses.replace(packed, data_order=data_order)
    whole = dataclasses.replace(packed, name="whole", checkpoint_every=3)
    read, load = [], Loader.__next__
    monkeypatch.setattr(Loader, "__next__", lambda self: read.append(load(self)) or read[-1])
    code, shown = run(whole)
    assert code == 0 and len(rows(whole, "train")) == 6
    batches, read[:] = list(read), []
    assert "documents do not see each other: each begins with token 256" in shown
    assert all(batch.segments.shape == batch.inputs.shape for batch in batches)
    shutil.copytree(whole.run_dir, packed.run_dir)
    shutil.rmtree(packed.run_dir / "checkpoints" / "6")
    same_as(whole, packed, "resuming from step 3")  # in the second stage
    for ours, theirs in zip(read, batches[3:], strict=True):
        jax.tree.map(np.testing.assert_array_equal, ours, theirs)

    expected = {12: batches[:2], 40: batches[2:]}
    for maximum, windows in expected.items():
        rows_ = [row for batch in windows for row in tokens_of(batch)]
        assert all(row[0] == 256 for row in rows_)
        longest = max(np.diff([*np.flatnonzero(row == 256), len(row)]).max() for row in rows_)
        assert longest == min(maximum, 33)
    if data_order == "sequential":
        return
    for line in (
        "from step 0: sequences begin with a document, and documents are cut to 12 tokens: ",
        "from step 2: sequences begin with a document, and documents are cut to 40 tokens: ",
        "from step 4: sequences begin with a document, and documents are cut to 40 tokens: ",
    ):
        assert line in shown, shown


def test_orders_of_the_stages(packed):
    same = Stage(until=3, max_document_length=12, batch_tokens=256)
    packed = dataclasses.replace(packed, stages=(STAGES[0], same, *STAGES[1:]))
    spans = Timeline(packed).spans
    assert [(span.order, span.position) for span in spans] == [(0, 0), (0, 32), (1, 0), (2, 0)]
    assert [span.config.max_document_length for span in spans] == [12, 12, 40, 40]
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    inputs = Inputs.find(packed, mesh)
    tokens = np.concatenate([np.fromfile(x, "<u2", offset=1024) for x in inputs.dataset.train])
    lengths = {0: (32, 12), 1: (32, 40), 2: (16, 40)}
    counts = {order: len(pack(tokens, *both, eot=256)) for order, both in lengths.items()}
    assert inputs.packed == counts
    share = counts[2] * 17 / len(tokens)
    assert [*header._packed(inputs)][2].endswith(
        f"to 40 tokens: {share:.1%} of the tokens are read"
    )
    read = {0: 2 * 16 + 8, 1: 16, 2: 2 * 32}
    assert inputs.epochs == pytest.approx(sum(read[i] / inputs.packed[i] for i in read))


def in_order(shards, stretches):
    """Return the windows of each stretch, one document after another, as modded-nanogpt does."""
    result, number, at = [], 0, 0
    documents = [split(shard) for shard in shards]
    for stretch in stretches:
        windows, lengths = [], (stretch.sequence_length, stretch.packing.max_document_length)
        for _ in range(stretch.steps):
            step = []
            while len(step) < stretch.batch:
                if number == len(documents):
                    return None
                window, at = window_from(documents[number], at, *lengths)
                step.append(window)
                if window is None:  # the next shard
                    step, number, at = [], number + 1, 0
            windows += step
        result.append(windows)
    return result


@given(
    lengths=st.lists(st.integers(1, 40), min_size=5, max_size=60),
    cuts=st.lists(st.integers(1, 600), max_size=3),
    stretches=st.lists(
        st.builds(
            Stretch,
            st.integers(1, 24),
            st.integers(1, 3),
            st.integers(1, 3),
            st.builds(Packing, st.just(EOT), st.integers(1, 30)),
        ),
        min_size=1,
        max_size=3,
    ),
)
@settings(max_examples=60, deadline=None)
def test_windows_in_order_are_those_of_a_plain_packer(lengths, cuts, stretches):
    with tempfile.TemporaryDirectory() as folder:
        paths, _ = write_documents(folder, lengths, before=2, cuts=cuts)
        shards = [np.fromfile(path, "<u2", offset=1024) for path in paths]
        own = stretches[-1]
        how = {"packing": own.packing, "sequential": stretches}
        if (expected := in_order(shards, stretches)) is None or sum(map(len, shards)) <= (
            own.sequence_length
        ):
            with pytest.raises(ShardError, match="found"):
                Windows(paths, own.sequence_length, VOCAB, **how)
            return
        windows = Windows(paths, own.sequence_length, VOCAB, **how)
        check_windows(windows, expected[-1])


def test_contiguous_windows_in_order(tmp_path):
    """Each token once, also where the sequence length changes."""
    paths, tokens = write_documents(tmp_path, [100, 60], cuts=[70])
    stretches = [Stretch(5, 4, 2, None), Stretch(11, 2, 3, None), Stretch(7, 1, 2, None)]
    read = []
    for i, own in enumerate(stretches, start=1):
        how = {"sequence_length": own.sequence_length, "batch": own.batch, "packing": None}
        read += [*take(paths, own.steps, sequential=stretches[:i], **how).reshape(-1)]
        resumed = take(paths, 1, start=own.batch, sequential=stretches[:i], **how)
        windows = take(paths, 2, sequential=stretches[:i], **how)
        np.testing.assert_array_equal(resumed[0], windows[1])
    ends = np.cumsum([0, *(n for s in stretches for n in [s.sequence_length] * s.batch * s.steps)])
    expected = [tokens[a : b + 1] for a, b in itertools.pairwise(ends)]
    np.testing.assert_array_equal(read, np.concatenate(expected))
    with pytest.raises(ShardError, match="expected at least 163 tokens .* found 160; train with"):
        Windows(paths, 11, VOCAB, sequential=[Stretch(6, 5, 1, None), Stretch(11, 4, 3, None)])


def test_validation_of_a_run_in_order_reads_the_first_tokens(tmp_path):
    paths, tokens = write_documents(tmp_path, [100])
    how = {"sequence_length": 5, "batch": 2, "count": 3}
    read = np.stack([tokens_of(batch) for batch in fixed_batches(paths, **how, first=True)])
    np.testing.assert_array_equal(read[..., :-1].reshape(-1), tokens[:30])
    other = np.stack([tokens_of(batch) for batch in fixed_batches(paths, **how)])
    assert not np.array_equal(other, read)


def test_a_run_in_order_needs_its_tokens(packed):
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    optimizer = dataclasses.replace(packed.optimizer, schedule_steps=3000)
    how = {"data_order": "sequential", "max_steps": 3000, "optimizer": optimizer}
    packed = dataclasses.replace(packed, **how)
    with pytest.raises(ConfigError, match="^stage 3 of 3: expected training shards for all st"):
        Inputs.find(packed, mesh)
    with pytest.raises(ConfigError, match="--data-order sequential needs max_document_l"):
        dataclasses.replace(packed, max_document_length=None)


def test_options(packed, words):
    with pytest.raises(ConfigError, match="^--max-document-length 8 needs --separate-documents$"):
        Config(max_document_length=8)
    with pytest.raises(ConfigError, match="^stage 1: --max-document-length 8 needs --separate"):
        Config(stages=(Stage(max_document_length=8),))
    with pytest.raises(ConfigError, match="--max-document-length must be at least 1"):
        Config(separate_documents=True, max_document_length=0)
    mesh = jax.make_mesh((1,), ("data",), devices=jax.devices("cpu")[:1])
    with pytest.raises(ConfigError, match="expected documents that begin with the end-of-text"):
        Inputs.find(dataclasses.replace(packed, dataset=str(words)), mesh)
