"""llm.c's model checkpoints (`.bin`): load and save.

A file is 256 little-endian int32, then every tensor in C order, all fp32 (version 3) or all bf16
(version 5):

    header  0 magic 20240326 · 1 version · 2 max_seq_len · 3 vocab_size · 4 num_layers
            · 5 num_heads · 6 channels · 7 padded_vocab_size · the rest 0
    tensors wte (P, C) · wpe (T, C) · ln1w, ln1b (L, C) · qkvw (L, 3C, C) · qkvb (L, 3C)
            · attprojw (L, C, C) · attprojb (L, C) · ln2w, ln2b (L, C) · fcw (L, 4C, C)
            · fcb (L, 4C) · fcprojw (L, C, 4C) · fcprojb (L, C) · lnfw, lnfb (C)

Matrices are (out, in), the transpose of gptjax's kernels. P padded vocabulary, T block size,
C channels, L layers.
"""

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.precision import Precision
from gptjax.weights.architectures import Kind, gpt2_kinds
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import file_size, reason, replacing, shown
from gptjax.weights.params import FP32, Key, check_model, check_options, host_arrays

SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")
"""Fields of `GPT2Config` in the order of the header."""
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


def read_config(path: Path, *, precision: Precision = FP32, **options: Any) -> GPT2Config:
    """Return the config in the header; no tensor is read. Arguments: see `load_llmc`."""
    check_options(GPT2Config, precision, options, source="the file", decided=SIZES)
    try:
        length = file_size(path)
        version, config = _read_header(path, precision, options)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    _check_length(path, config, DTYPES[version], length)
    return config


def tensors_of(path: Path, config: GPT2Config) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator over the parameters of a file whose config is `read_config(path)`."""
    try:
        version, _ = _read_header(path, FP32, {})
        numbers = np.memmap(path, dtype=DTYPES[version], mode="r", offset=HEADER_BYTES)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: cannot be read: {reason(error)}") from error
    return _tensors(numbers, config)


def save_llmc(model: GPT2, path: str | os.PathLike, *, dtype: str = "fp32") -> None:
    """Save a model as a checkpoint that llm.c reads. The file is written atomically.

    Args:
        model: a GPT2. Padded rows of the vocabulary are saved too (llm.c expects a multiple of
            128).
        path: the `.bin` file.
        dtype: "fp32" for llm.c's fp32 build; "bf16" for llm.c's bf16 build, rounded to nearest.

    Raises:
        ValueError: an unknown dtype.
        WeightsError: the model is a subclass of GPT2; the file cannot be written, for example
            because the folder does not exist or the disk is full.
    """
    check_model("save_llmc", model, GPT2)
    if dtype not in VERSIONS:
        raise ValueError(f"save_llmc: unknown dtype {dtype!r}; choose one of {list(VERSIONS)}")
    config, params = model.config, host_arrays(model)
    header = np.zeros(HEADER_INTS, "<i4")
    header[:2] = MAGIC, VERSIONS[dtype]
    header[2:8] = [getattr(config, name) for name in SIZES]
    with replacing(Path(path)) as temporary, open(temporary, "wb") as file:
        file.write(header.tobytes())
        for kind in _kinds(config):
            for key, *_ in kind.each():
                tensor = params[key].T if key[-1] == "kernel" else params[key]
                file.write(tensor.astype(DTYPES[VERSIONS[dtype]]).tobytes())


def _kinds(config: GPT2Config) -> list[Kind]:
    """Return the kinds of tensors in the order of the file, which has padded rows."""
    return gpt2_kinds(dataclasses.replace(config, vocab_size=config.padded_vocab_size))


def _tensors(numbers: np.ndarray, config: GPT2Config) -> Iterator[tuple[Key, np.ndarray]]:
    at = 0
    for kind in _kinds(config):
        matrix = kind.key[-1] == "kernel"
        for key, *_ in kind.each():
            tensor = numbers[at : at + kind.size].astype(np.float32)
            at += kind.size
            shape = kind.shape[::-1] if matrix else kind.shape
            yield key, tensor.reshape(shape).T if matrix else tensor.reshape(shape)


def _read_header(
    path: Path, precision: Precision, options: dict[str, Any]
) -> tuple[int, GPT2Config]:
    """Return version and config."""
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    header = [int(number) for number in np.frombuffer(raw[: len(raw) // 4 * 4], "<i4")]
    if header and header[0] != MAGIC:
        kind = _OTHER_FILES.get(header[0], "not a file of llm.c's")
        raise WeightsError(
            f"{shown(path)}: expected the magic {MAGIC} of an llm.c model at offset 0, found "
            f"{header[0]} ({kind})"
        )
    if len(raw) < HEADER_BYTES:
        raise WeightsError(
            f"{shown(path)}: expected a header of {HEADER_BYTES} bytes, found a file of {len(raw)}"
        )
    if header[1] not in DTYPES:
        raise WeightsError(
            f"{shown(path)}: expected version 3 (fp32) or 5 (bf16) at offset 4, found {header[1]}. "
            "Export the model again with a newer llm.c"
        )
    sizes = dict(zip(SIZES, header[2:8], strict=True))
    try:
        return header[1], GPT2Config(**sizes, precision=precision, **options)
    except ValueError as error:
        raise WeightsError(
            f"{shown(path)}: the header at offset 8 … 31 says {sizes}, which is no GPT-2: {error}"
        ) from error


def _check_length(path: Path, config: GPT2Config, dtype: np.dtype, found: int) -> None:
    """Compare the file's length with the header, before an array of its sizes is allocated."""
    start, end, at = HEADER_BYTES, HEADER_BYTES, None
    for kind in _kinds(config):
        start, end = end, end + dtype.itemsize * kind.size * (kind.layers or 1)
        if at is None and found < end:
            at = _where(kind, dtype.itemsize * kind.size, start, found)
    if found != end:
        raise WeightsError(
            f"{shown(path)}: expected {end} bytes for this header ({config.n_layer} layers, "
            f"{config.n_embd} channels, {dtype.name}), found {found}: "
            f"{at or f'too long, the last tensor ends at {end}'}. Copy or export the file again"
        )


def _where(kind: Kind, length: int, start: int, found: int) -> str:
    """Return a description of the tensor in which a file of `found` bytes ends.

    Args:
        length: bytes of each tensor of the kind.
        start: offset of the first tensor of the kind.
    """
    layer = (found - start) // length
    start += layer * length
    key = kind.key if kind.layers is None else ("blocks", layer, *kind.key)
    name, last = ".".join(map(str, key)), start + length - 1
    return f"cut short, inside {name}, which is at offset {start} … {last}"
