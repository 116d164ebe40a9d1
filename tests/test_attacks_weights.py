"""Damaged weight files are refused. `python tests/test_attacks_weights.py N` runs N trials.

Each trial copies a small saved model and changes one thing: a value or bytes of config.json, bits,
length, header or tensors of the safetensors file, its index, the header, bits or length of an llm.c
file; or it replaces a file by a FIFO, device, directory, link or pickle. Then the model is loaded.

Outcomes: `refused` (a WeightsError in one printable line), `same model`, and two that the formats
cannot detect because they have no checksum: `other values` (bits of the weights) and `other sizes
that fit the file` (for example n_head). Failures: `silent wrong`, `wrong exception`, `unprintable
message`, `code ran` (from a pickle), `memory` (64 MiB or more for files of 15 KB), `hang`.
"""

import json
import os
import pickle
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from attack_tools import counted, in_a_process
from flax import nnx
from safetensors.numpy import load_file, save_file

from gptjax import GPT2, GPT2Config, load_hf, load_llmc, save_hf, save_llmc
from gptjax.terminal import printable
from gptjax.weights import WeightsError

SHAPE = GPT2Config(vocab_size=11, block_size=5, n_layer=2, n_head=2, n_embd=4)
HEADER = 1024
MEMORY = 64 << 20
UNDETECTABLE = {"other values", "other sizes that fit the file"}
TIMEOUT = 10.0


class Hang(BaseException):
    """A trial that does not end."""


# --------------------------------------------------------------------------------- changes to bytes
def flip(file: Path, rng: random.Random, start: int = 0, stop: int | None = None) -> None:
    raw = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 8])):
        raw[rng.randrange(start, stop or len(raw))] ^= 1 << rng.randrange(8)
    file.write_bytes(raw)


def truncate(file: Path, rng: random.Random) -> None:
    os.truncate(file, rng.choice([0, 1, 7, 8, HEADER, rng.randrange(file.stat().st_size)]))


def extend(file: Path, rng: random.Random) -> None:
    with file.open("ab") as opened:
        opened.write(rng.randbytes(rng.choice([1, 2, 4, 100, 5000])))


def garbage(file: Path, rng: random.Random) -> None:
    file.write_bytes(rng.choice([b"", b"\0" * 3000, rng.randbytes(3000), b"<html>404</html>"]))


class Dangerous:
    """A pickle that creates a file where it is loaded."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def pickled(file: Path, rng: random.Random) -> None:
    file.write_bytes(pickle.dumps(Dangerous(str(file.parent / "ran")), protocol=rng.randrange(6)))


def not_a_file(file: Path, rng: random.Random) -> None:
    """Replace the file by something that is no regular file."""
    file.unlink()
    change = rng.choice(["absent", "directory", "FIFO", "loop", "zero", "full", "tty"])
    if change == "directory":
        file.mkdir()
    elif change == "FIFO":
        os.mkfifo(file)
    elif change != "absent":
        file.symlink_to(file if change == "loop" else f"/dev/{change}")


# ------------------------------------------------------------------------------------- Hugging Face
WEIRD = (
    ["12", "", 12.0, True, False, None, -1, 0, 1, 3, 4, 10**6, 2**31, 2**63, 10**40, 1e308, {}, []]
    + [float("nan"), float("inf"), [4], {"a": 1}, "\x1b[31mred", "\x1b]0;title\x07", "x" * 10**5]
    + [["gelu_new"], 1e-6, "gpt_neo", "gelu"]
)


def config_value(folder: Path, rng: random.Random) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    field = rng.choice(["vocab_size", "n_positions", "n_layer", "n_head", "n_embd", *config])
    config[field] = rng.choice(WEIRD)
    if rng.random() < 0.1:
        del config[field]
    file.write_text(json.dumps(config))


def config_text(folder: Path, rng: random.Random) -> None:
    file = folder / "config.json"
    nested = b"[" * 10**5, b'{"a":' * 10**5, b'{"n_layer": ' + b"9" * 10**4 + b"}"
    other = b"[]", b"12", b"null", b"\xff\xfe{}", b"{}", b'{"model_type": "gpt2"}', *nested
    match rng.randrange(3):
        case 0:
            flip(file, rng)
        case 1:
            truncate(file, rng)
        case 2:
            file.write_bytes(rng.choice(other))


def safetensors_header(folder: Path, rng: random.Random) -> None:
    """Another length of the header, bits in it, or another header."""
    file = folder / "model.safetensors"
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    match rng.randrange(3):
        case 0:
            other = rng.choice([0, 1, length - 1, length + 1, 10**8, 2**40, 2**64 - 1])
            file.write_bytes(other.to_bytes(8, "little") + raw[8:])
            return
        case 1:
            flip(file, rng, 0, 8 + length)
            return
    entry = header[rng.choice([name for name in header if name != "__metadata__"])]
    field = rng.choice(["dtype", "shape", "data_offsets"])
    huge = [[0, 2**63], [2**63], [0], [], [-1, 4], [2**32, 2**32], None, "\x1b[31m", 1.5, {}]
    entry[field] = rng.choice(["F64", "I32", "BOOL", "F8_E4M3", "F4", "C64", *huge])
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def safetensors_tensors(folder: Path, rng: random.Random) -> None:
    """A tensor less, more, or of another shape, dtype or name."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = rng.choice(sorted(tensors))
    tensor = tensors.pop(name)
    match rng.randrange(7):
        case 0:
            tensors["\x1b[31m" + name] = tensor
        case 1:
            tensors |= {name: tensor, name.removeprefix("transformer."): tensor + 1}
        case 2:
            tensors[name] = tensor.reshape(-1, 1)
        case 3:
            tensors[name] = np.full_like(tensor, 1e300, dtype=np.float64)
        case 4:
            tensors[name] = tensor.astype(rng.choice([np.int32, np.bool_, np.uint16, np.complex64]))
        case 5:
            tensors |= {name: tensor, "lm_head.weight": tensor}
    save_file(tensors, file, metadata={"format": "pt"})


def index(folder: Path, rng: random.Random) -> None:
    """A damaged index of an intact file."""
    (folder / "model.safetensors").rename(folder / "part.safetensors")
    outside = shutil.copy(folder / "part.safetensors", folder.parent / "outside.safetensors")
    names = ["../outside.safetensors", str(outside), "config.json", ".", "..", "", "a\0b", "absent"]
    names += [12, None, [], "x" * 5000, "\x1b[31m", "\ud800", "sub/part.safetensors"]
    whole = rng.choice(
        [None, [], "x", {}, {"weight_map": None}, {"weight_map": [1]}, {"weight_map": {}}]
    )
    damaged = {"weight_map": {"a": rng.choice(names), "b": "part.safetensors"}}
    text = json.dumps(whole if rng.random() < 0.2 else damaged)
    (folder / "model.safetensors.index.json").write_text(text)
    if rng.random() < 0.2:
        rng.choice([flip, truncate, garbage, not_a_file])(
            folder / "model.safetensors.index.json", rng
        )


# -------------------------------------------------------------------------------------------- llm.c
def llmc_header(folder: Path, rng: random.Random) -> None:
    file = folder / "model.bin"
    raw = bytearray(file.read_bytes())
    for _ in range(rng.choice([1, 1, 2, 6])):
        value = rng.choice([rng.randrange(-(2**31), 2**31), 2**31 - 1, -1, 0, 1, 2, 3, 4, 5, 128])
        struct.pack_into("<i", raw, 4 * rng.randrange(8), value)
    file.write_bytes(raw)
    if rng.random() < 0.3:
        os.truncate(file, 36 << 10)


# Share of the trials, attack, and outcomes other than `refused` and `same model` that are right.
ATTACKS: list[tuple[int, str, Callable[[Path, random.Random], None], set[str]]] = [
    (20, "config.json: a value", config_value, {"other sizes that fit the file"}),
    (10, "config.json: text", config_text, {"other sizes that fit the file"}),
    (10, "safetensors: bits", lambda f, r: flip(f / "model.safetensors", r), {"other values"}),
    (4, "safetensors: truncated", lambda f, r: truncate(f / "model.safetensors", r), set()),
    (2, "safetensors: extended", lambda f, r: extend(f / "model.safetensors", r), set()),
    (2, "safetensors: garbage", lambda f, r: garbage(f / "model.safetensors", r), set()),
    (10, "safetensors: header", safetensors_header, set()),
    (6, "safetensors: tensors", safetensors_tensors, set()),
    (7, "safetensors: index", index, set()),
    (
        4,
        "Hugging Face: no file",
        lambda f, r: not_a_file(f / r.choice(["config.json", "model.safetensors"]), r),
        set(),
    ),
    (
        2,
        "Hugging Face: pickle",
        lambda f, r: pickled(f / r.choice(["model.safetensors", "config.json"]), r),
        set(),
    ),
    (10, "llm.c: header", llmc_header, {"other sizes that fit the file"}),
    (5, "llm.c: bits", lambda f, r: flip(f / "model.bin", r), UNDETECTABLE),
    (4, "llm.c: truncated", lambda f, r: truncate(f / "model.bin", r), set()),
    (1, "llm.c: extended", lambda f, r: extend(f / "model.bin", r), set()),
    (1, "llm.c: garbage", lambda f, r: garbage(f / "model.bin", r), set()),
    (1, "llm.c: no file", lambda f, r: not_a_file(f / "model.bin", r), set()),
    (1, "llm.c: pickle", lambda f, r: pickled(f / "model.bin", r), set()),
]


# ------------------------------------------------------------------------------------------- trials
def compare(model: GPT2, original: GPT2) -> str:
    if model.config != original.config:
        return "other sizes that fit the file"
    pair = (jax.tree.leaves(nnx.state(m, nnx.Param)) for m in (model, original))
    equal = all(np.array_equal(a, b, equal_nan=True) for a, b in zip(*pair, strict=True))
    return "same model" if equal else "other values"


def load(folder: Path, attack: str, original: GPT2) -> tuple[str, str]:
    """The outcome, and what was said."""

    def stop(*_):
        raise Hang

    signal.signal(signal.SIGALRM, stop)
    # Repeated: an exception in a callback of the garbage collector is lost.
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT, 1.0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = ""
    try:
        outcome = compare(
            load_llmc(folder / "model.bin") if attack.startswith("llm.c") else load_hf(folder),
            original,
        )
    except Hang:
        outcome = "hang"
    except WeightsError as error:
        said = str(error)
        outcome = (
            "refused" if said == printable(said) and "\n" not in said else "unprintable message"
        )
    except Exception as error:  # every other exception is a failure
        outcome, said = "wrong exception", f"{type(error).__name__}: {error}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (folder / "ran").exists():
        outcome = "code ran"
    grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return ("memory", f"{grown} bytes; {outcome}: {said}") if grown >= MEMORY else (outcome, said)


def trial(original: Path, attack: tuple, model: GPT2, rng: random.Random) -> dict:
    _, name, change, right = attack
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(shutil.copytree(original, Path(temporary) / "model"))
        change(folder, rng)
        outcome, said = load(folder, name, model)
    if outcome in UNDETECTABLE - right:
        outcome, said = "silent wrong", outcome
    return {"attack": name, "outcome": outcome, "said": said.replace(temporary, "")[:300]}


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
        attacks = rng.choices(ATTACKS, [attack[0] for attack in ATTACKS], k=trials)
        return [trial(original, attack, model, rng) for attack in attacks]


def test_damaged_weights():
    """In a process of its own: the trials use SIGALRM and read the process's peak memory."""
    found = counted(in_a_process(__file__, 120), {"refused", "same model", *UNDETECTABLE})
    assert found["refused"] > 60


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
