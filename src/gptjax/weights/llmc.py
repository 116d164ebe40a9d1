"""llm.c's model checkpoints (`.bin`), both ways.

A file is 256 little-endian int32, then every tensor in C order, all fp32 (version 3) or all bf16 (version 5):

    header  0 magic 20240326 · 1 version · 2 max_seq_len · 3 vocab_size · 4 num_layers · 5 num_heads · 6 channels
            · 7 padded_vocab_size · the rest 0
    tensors wte (P, C) · wpe (T, C) · ln1w, ln1b (L, C) · qkvw (L, 3C, C) · qkvb (L, 3C) · attprojw (L, C, C)
            · attprojb (L, C) · ln2w, ln2b (L, C) · fcw (L, 4C, C) · fcb (L, 4C) · fcprojw (L, C, 4C) · fcprojb (L, C)
            · lnfw, lnfb (C)

Matrices are (out, in), the transpose of ours. P padded vocabulary, T block size, C channels, L layers.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision
from gptjax.weights._params import BLOCK_TENSORS, FP32, Key, arrays, build, replacing, shapes

MAGIC = 20240326
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
VERSIONS = {"fp32": 3, "bf16": 5}
DTYPES = {3: np.dtype("<f4"), 5: np.dtype(jnp.bfloat16)}
_OTHER_FILES = {
    20240327: "llm.c's debug state",
    20240328: "llm.c's tokenizer",
    20240520: "a shard of tokens",
    20240527: "llm.c's optimizer state",
}


def load_llmc(path: str | os.PathLike, *, precision: Precision = FP32, **how: Any) -> GPT2:
    """Reads a checkpoint that llm.c, its train_gpt2.py or `save_llmc` wrote. bf16 tensors become fp32 masters.

    Args:
        path: the `.bin` file.
        precision: of the model's computation; the parameters are fp32 in each.
        **how: other fields of `GPT2Config` that the file does not decide: attention, loss, loss_chunk, recompute.

    Raises:
        ValueError: not such a file, or one that is cut short or too long; says where, what was expected and what is there.
    """
    path = Path(path)
    header, config = _read_header(path, precision=precision, how=how)
    dtype = DTYPES[int(header[1])]
    layout = _layout(config)
    expected = HEADER_BYTES + dtype.itemsize * sum(int(np.prod(shape)) for _, shape in layout)
    if (found := path.stat().st_size) != expected:
        at = _where(layout, dtype.itemsize, found) if found < expected else f"the last tensor ends at {expected}"
        raise ValueError(
            f"{path}: expected {expected} bytes for this header ({config.n_layer} layers, {config.n_embd} channels, "
            f"{dtype.name}), found {found}: {'cut short' if found < expected else 'too long'}, {at}. "
            "Copy or export the file again"
        )
    numbers = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
    return build(config, _tensors(numbers, layout))


def save_llmc(model: GPT2, path: str | os.PathLike, *, dtype: str = "fp32") -> None:
    """Writes a checkpoint that llm.c reads. `path` is replaced when the whole file is on disk, never left half written.

    Args:
        model: any GPT2; its padded vocabulary is kept (llm.c expects a multiple of 128).
        path: the `.bin` file.
        dtype: fp32 for llm.c's fp32 build; bf16 for its bf16 build, each number rounded to the nearest.

    Raises:
        ValueError: an unknown dtype.
    """
    if dtype not in VERSIONS:
        raise ValueError(f"save_llmc: unknown dtype {dtype!r}; choose one of {list(VERSIONS)}")
    config, params = model.config, arrays(model)
    header = np.zeros(HEADER_INTS, "<i4")
    header[:8] = (
        MAGIC,
        VERSIONS[dtype],
        config.block_size,
        config.vocab_size,
        config.n_layer,
        config.n_head,
        config.n_embd,
        config.padded_vocab_size,
    )
    with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(header.tobytes())
        for key, _ in _layout(config):
            tensor = params[key].T if _is_matrix(key) else params[key]
            file.write(tensor.astype(DTYPES[VERSIONS[dtype]]).tobytes())


def _layout(config: GPT2Config) -> list[tuple[Key, tuple[int, ...]]]:
    """Every tensor of the file in its order, with its shape in the file."""
    keys: list[Key] = [("wte",), ("wpe",)]
    keys += [("blocks", layer, *key) for key, _ in BLOCK_TENSORS for layer in range(config.n_layer)]
    keys += [("ln_f", "scale"), ("ln_f", "bias")]
    ours = shapes(config)
    return [(key, ours[key][::-1] if _is_matrix(key) else ours[key]) for key in keys]


def _is_matrix(key: Key) -> bool:
    return key[-1] == "kernel"


def _tensors(numbers: np.ndarray, layout) -> Iterator[tuple[Key, np.ndarray]]:
    at = 0
    for key, shape in layout:
        tensor = numbers[at : at + int(np.prod(shape))].reshape(shape).astype(np.float32)
        at += tensor.size
        yield key, tensor.T if _is_matrix(key) else tensor


def _read_header(path: Path, *, precision: Precision, how: dict[str, Any]) -> tuple[np.ndarray, GPT2Config]:
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    header = np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")
    if header.size and header[0] != MAGIC:
        kind = _OTHER_FILES.get(int(header[0]), "not a file of llm.c's")
        raise ValueError(
            f"{path}: expected the magic {MAGIC} of an llm.c model at offset 0, found {header[0]} ({kind})"
        )
    if len(raw) < HEADER_BYTES:
        raise ValueError(f"{path}: expected a header of {HEADER_BYTES} bytes, found a file of {len(raw)}")
    if header[1] not in DTYPES:
        raise ValueError(
            f"{path}: expected version 3 (fp32) or 5 (bf16) at offset 4, found {header[1]}. "
            "Export the model again with a newer llm.c"
        )
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")
    sizes = dict(zip(names, map(int, header[2:8]), strict=True))
    decided = sorted(set(how) & set(sizes))
    if decided:
        raise ValueError(f"load_llmc: the file decides {decided}; leave them out")
    try:
        return header, GPT2Config(**sizes, precision=precision, **how)
    except ValueError as error:
        raise ValueError(f"{path}: the header at offset 8 … 31 says {sizes}, which is no GPT-2: {error}") from error


def _where(layout, itemsize: int, size: int) -> str:
    """The tensor in which a file of `size` bytes ends."""
    end = HEADER_BYTES
    for key, shape in layout:
        start, end = end, end + itemsize * int(np.prod(shape))
        if size < end:
            return f"inside {'.'.join(map(str, key))}, which is at offset {start} … {end - 1}"
    raise AssertionError("a file of the full size was called short")
