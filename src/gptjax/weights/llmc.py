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

import jax.numpy as jnp
import numpy as np

from gptjax.files import check_regular
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.weights.architectures import Kind, gpt2_kinds
from gptjax.weights.files import replacing
from gptjax.weights.params import Key, check_writable, host_arrays

SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "padded_vocab_size")
"""Fields of `GPT2Config` in the order of the header."""
MAGIC = 20240326
HEADER_INTS = 256
HEADER_BYTES = 4 * HEADER_INTS
VERSIONS = {"fp32": 3, "bf16": 5}
DTYPES = {3: np.dtype("<f4"), 5: np.dtype(jnp.bfloat16)}


def read_config(path: Path) -> GPT2Config:
    """Return the config in the header; no tensor is read.

    Raises:
        ValueError: the file is not an llm.c model, or its length differs from the header's.
    """
    check_regular(path)
    header = _read_header(path)
    config = GPT2Config(**dict(zip(SIZES, header[2:8], strict=True)))
    # Compared before an array of these sizes is allocated.
    numbers = sum(kind.size * (kind.layers or 1) for kind in _kinds(config))
    expected = HEADER_BYTES + DTYPES[header[1]].itemsize * numbers
    if (length := path.stat().st_size) != expected:
        raise ValueError(
            f"expected {expected} bytes for this header ({config.n_layer} layers, {config.n_embd} "
            f"channels, {DTYPES[header[1]].name}), found {length}. Copy or export the file again"
        )
    return config


def tensors_of(path: Path, config: GPT2Config) -> Iterator[tuple[Key, np.ndarray]]:
    """Return an iterator over the parameters of a file whose config is `read_config(path)`."""
    dtype, at = DTYPES[_read_header(path)[1]], 0
    numbers = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES)
    for kind in _kinds(config):
        matrix = kind.key[-1] == "kernel"
        for key, *_ in kind.each():
            tensor = numbers[at : at + kind.size].astype(np.float32)
            at += kind.size
            shape = kind.shape[::-1] if matrix else kind.shape
            yield key, tensor.reshape(shape).T if matrix else tensor.reshape(shape)


def save_llmc(model: GPT2, path: str | os.PathLike, *, dtype: str = "fp32") -> None:
    """Save a model as a checkpoint that llm.c reads. The file is written atomically.

    Args:
        model: a GPT2. Padded rows of the vocabulary are saved too (llm.c expects a multiple of
            128).
        path: the `.bin` file.
        dtype: "fp32" for llm.c's fp32 build; "bf16" for llm.c's bf16 build, rounded to nearest.

    Raises:
        ValueError: an unknown dtype.
        WeightsError: the model is of another class or a subclass; the file cannot be written, for
            example because the folder does not exist or the disk is full.
    """
    check_writable("save_llmc", model, dtype, GPT2)
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


def _read_header(path: Path) -> list[int]:
    header = np.fromfile(path, "<i4", HEADER_INTS).tolist()
    if header[:1] == [int.from_bytes(b"PK\3\4", "little")]:
        raise ValueError(
            "expected an llm.c model, found a zip archive, as of PyTorch's pickles, which could "
            "run code. Save the model again with save_pretrained(path, safe_serialization=True)"
        )
    if len(header) < HEADER_INTS or header[0] != MAGIC or header[1] not in DTYPES:
        raise ValueError(
            f"expected a header of {HEADER_BYTES} bytes, which begins with the magic {MAGIC} of an "
            "llm.c model and the version 3 (fp32) or 5 (bf16), found "
            f"{4 * len(header)} bytes that begin with {header[:2]}. Export an older model again "
            "with a newer llm.c"
        )
    return header
