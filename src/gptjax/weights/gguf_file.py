"""GGUF files (llama.cpp), written with the package `gguf`.

Names, metadata and transposes equal the result of llama.cpp's conversion of a Hugging Face model.
Matrices are (out, in), the transpose of gptjax's kernels. The vocabulary is stored without padding.
"""

import dataclasses
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from gptjax.data.tokenizers import AnyTokenizer
from gptjax.models.base import Model
from gptjax.models.llama3 import frequencies
from gptjax.weights.architectures import ARCHITECTURES, Architecture, of_config
from gptjax.weights.bpe_files import fields_of
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import replacing
from gptjax.weights.params import check_writable, host_arrays

# Llama 3's pre-tokenizer, which llama.cpp implements for the type "llama-bpe".
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def check_gguf() -> None:
    """Raise WeightsError if the package gguf is not installed."""
    if importlib.util.find_spec("gguf") is None:
        raise WeightsError("GGUF files need the package gguf: pip install 'gptjax[gguf]'")


def save_gguf(
    model: Model, path: Path, *, tokenizer: AnyTokenizer | None, name: str, dtype: str = "fp32"
) -> bool:
    """Write a model as a GGUF file. The file is written atomically.

    Args:
        path: the file.
        tokenizer: stored if it is GPT-2's, or a byte-level BPE with the pre-tokenizer of GPT-2 or
            Llama 3.
        name: value of general.name.
        dtype: "fp32", or "bf16" for matrices in bf16.

    Returns:
        Whether the file has the tokenizer.

    Raises:
        WeightsError: the package gguf is missing, the model is of another class or a subclass, or
            the file cannot be written.
    """
    check_writable("save_gguf", model, dtype, *(each.model for each in ARCHITECTURES.values()))
    check_gguf()
    import gguf

    config: Any = model.config
    architecture = of_config(config)
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(name)
    narrow, kind = dtype == "bf16", gguf.GGMLQuantizationType.BF16
    files = gguf.LlamaFileType
    writer.add_file_type(files.MOSTLY_BF16 if narrow else files.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    sizes = {
        "block_count": config.n_layer,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "attention.head_count": config.n_head,
    }
    for key, value in (sizes | architecture.metadata(config)).items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture.name}.{key}", value)
    fields = {} if tokenizer is None else fields_of(tokenizer)
    pre = _pre_tokenizer(fields)
    if tokenizer is not None and pre is not None:
        _add_bpe(writer, gguf.TokenType, fields, tokenizer, config.vocab_size)
        writer.add_tokenizer_pre(pre)
    writer.add_tokenizer_model("none" if pre is None else "gpt2")
    for tensor, array in _tensors(model, architecture):
        array = np.ascontiguousarray(array, np.float32)
        if narrow and array.ndim > 1:
            writer.add_tensor(tensor, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor, array)
    with replacing(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
        finally:
            writer.close()
    return pre is not None


def _pre_tokenizer(fields: dict[str, Any]) -> str | None:
    """Return llama.cpp's type of a byte-level BPE, or None if llama.cpp splits texts otherwise."""
    first = fields.get("pre_tokenizer") or {"type": None}
    *splits, last = first.get("pretokenizers", [first])
    patterns = [split.get("pattern", {}).get("Regex") for split in splits]
    for pre, regexes in (("gpt-2", []), ("llama-bpe", [LLAMA_3])):
        level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": not regexes}
        if patterns == regexes and last.items() >= level.items():
            bpe = fields["model"]["type"] == "BPE" and not fields.get("normalizer")
            return pre if bpe else None
    return None


def _add_bpe(
    writer: Any, kinds: Any, fields: dict[str, Any], tokenizer: AnyTokenizer, vocab_size: int
) -> None:
    tokens, types = [f"[PAD{id}]" for id in range(vocab_size)], [kinds.UNUSED] * vocab_size
    for text, id in fields["model"]["vocab"].items():
        tokens[id], types[id] = text, kinds.NORMAL
    for token in fields["added_tokens"]:
        kind = kinds.CONTROL if token["special"] else kinds.USER_DEFINED
        tokens[token["id"]], types[token["id"]] = token["content"], kind
    merges = fields["model"]["merges"]
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id((*tokenizer.prefix, tokenizer.eot)[0])
    writer.add_eos_token_id(tokenizer.eot)
    writer.add_add_bos_token(bool(tokenizer.prefix))


def _tensors(model: Model, architecture: Architecture) -> Iterator[tuple[str, np.ndarray]]:
    params, config = host_arrays(model), cast(Any, model.config)
    for kind in architecture.kinds(config):
        for key, _, name in kind.each():
            array = params[key].T if key[-1] == "kernel" else params[key][: kind.shape[0]]
            if kind.key in (("attn", "q", "kernel"), ("attn", "k", "kernel")):
                array = _interleaved(array, config.head_dim)
            yield name, array
    # GPT-2's head is tied; llama.cpp before 2024 needs the head as a separate tensor. For a Llama
    # without a head, llama.cpp uses the embedding.
    if architecture.name == "gpt2":
        yield "output.weight", params[("wte",)][: config.vocab_size]
    elif config.rope_scaling != 1:
        unscaled = frequencies(dataclasses.replace(config, rope_scaling=1.0))
        yield "rope_freqs.weight", unscaled / frequencies(config)


def _interleaved(rows_OC: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows of each head in the order 0, D/2, 1, D/2 + 1, ….

    Source: `permute` in llama.cpp's convert_hf_to_gguf.py. For the architecture "llama", llama.cpp
    rotates channel 2i with channel 2i + 1; `gptjax.Llama3` rotates i with i + D/2.
    """
    rows_HPEC = rows_OC.reshape(-1, 2, head_dim // 2, rows_OC.shape[1])
    return rows_HPEC.swapaxes(1, 2).reshape(rows_OC.shape)
