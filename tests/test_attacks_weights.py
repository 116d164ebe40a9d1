"""Damaged weight files are refused. `python tests/test_attacks_weights.py N` runs N trials.

Each trial copies a small saved model and changes one file at random: bits, the length, a block of
zeros or all contents; or it replaces the file by a FIFO, device, directory, link or pickle. Then
the model is loaded.

Outcomes: `refused` (a WeightsError in one printable line), `same model`, and two that the formats
cannot detect because they have no checksum: `other values` (bits of the weights) and `other sizes
that fit the file` (for example n_head). Failures: `silent wrong`, `crash` (another exception),
`control characters`, `several lines`, `code ran` (from a pickle), `memory` (64 MiB or more for
files of 15 KB), `hang`.
"""

import contextlib
import json
import pickle
import random
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from attack_tools import (
    counted,
    damage,
    flip_bits,
    in_a_process,
    judged,
    not_a_file,
    resize,
    zero_block,
)
from flax import nnx

from gptjax import GPT2, GPT2Config, load_hf, load_llmc, save_hf, save_llmc
from gptjax.weights import WeightsError

SHAPE = GPT2Config(vocab_size=11, block_size=5, n_layer=2, n_head=2, n_embd=4)
MEMORY = 64 << 20
VALUES, SIZES = "other values", "other sizes that fit the file"


def garbage(content: bytes, rng: random.Random) -> bytes:
    return rng.choice([b"", b"\0" * 3000, rng.randbytes(3000), b"<html>404</html>"])


class Dangerous:
    """A pickle that creates a file where it is loaded."""

    def __reduce__(self):
        return open, ("ran", "w")


def pickled(content: bytes, rng: random.Random) -> bytes:
    return pickle.dumps(Dangerous(), protocol=rng.randrange(6))


# Outcomes of changed bits, beside `refused` and `same model`, that are right: no format has a
# checksum. tests/test_weights_errors.py has wrong fields of each format.
FILES = {"config.json": {SIZES}, "model.safetensors": {VALUES}, "model.bin": {VALUES, SIZES}}
CHANGES = {flip_bits: 4, resize: 3, zero_block: 2, garbage: 1, pickled: 1, not_a_file: 2}


def compare(model: GPT2, original: GPT2) -> str:
    if model.config != original.config:
        return SIZES
    pair = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, original))
    equal = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*pair, strict=True))
    return "same model" if equal else VALUES


def memory() -> int:
    """The most memory that this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def trial(original: Path, model: GPT2, rng: random.Random) -> dict:
    name = rng.choice([*FILES])
    (change,) = rng.choices([*CHANGES], [*CHANGES.values()])
    right = FILES[name] if change in (flip_bits, zero_block) else set()
    load = load_llmc if name == "model.bin" else load_hf
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        folder = Path(shutil.copytree(original, "model"))
        damage(folder / name, change, rng)
        before, path = memory(), folder / name if name == "model.bin" else folder
        outcome, said = judged(lambda: compare(load(path), model), WeightsError)
        if outcome in {VALUES, SIZES} - right:
            outcome, said = "silent wrong", outcome
        if "\n" in said:
            outcome = "several lines"
        if (grown := memory() - before) >= MEMORY:
            outcome, said = "memory", f"{grown} bytes; {outcome}: {said}"
        if Path("ran").exists():
            outcome = "code ran"
    return {"attack": f"{name}: {change.__name__}", "outcome": outcome, "said": said[:300]}


def run(trials: int, seed: int = 1) -> list[dict]:
    jax.config.update("jax_platforms", "cpu")
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as temporary:
        original, model = Path(temporary), GPT2(SHAPE, rngs=nnx.Rngs(seed))
        save_hf(model, original)
        save_llmc(model, original / "model.bin")
        # What JAX and safetensors allocate once must not count for a trial.
        loaded = load_hf(original), load_llmc(original / "model.bin")
        assert [compare(each, model) for each in loaded] == 2 * ["same model"]
        return [trial(original, model, rng) for _ in range(trials)]


def test_damaged_weights():
    """In a process of its own: the trials use SIGALRM and read the process's peak memory."""
    found = counted(in_a_process(__file__, 120), {"refused", "same model", VALUES, SIZES})
    assert found["refused"] > 60


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
