"""GGUF files (llama.cpp), fp32, written with the package `gguf`.

Names, metadata and transposes equal the result of llama.cpp's conversion of a Hugging Face model.
Matrices are (out, in), the transpose of gptjax's kernels. The vocabulary is stored without padding.
"""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gptjax.data.tokenizers import EOT_TEXT, GPT2Tokenizer, get_tokenizer
from gptjax.models import gpt2
from gptjax.models.base import Model
from gptjax.models.llama3 import Llama3, Llama3Config, frequencies
from gptjax.weights.bpe_files import merges, text_of
from gptjax.weights.errors import WeightsError
from gptjax.weights.gpt2 import GGUF_BLOCK_NAMES, GGUF_NAMES, tensor_kinds
from gptjax.weights.llama import tensors_in
from gptjax.weights.params import Key, check_model, host_arrays


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Names and metadata of an architecture in llama.cpp.

    Attributes:
        name: value of general.architecture.
        model: class of the models.
        metadata: function of the model's config: keys without the architecture's name, and values.
        tensors: function of the model: names and fp32 arrays.
    """

    name: str
    model: type[Model]
    metadata: Callable[[Any], dict[str, int | float]]
    tensors: Callable[[Any], Iterator[tuple[str, np.ndarray]]]


def save_gguf(
    model: Model, path: Path, *, architecture: Architecture, tokenizer: str | None, name: str
) -> None:
    """Write a model as a GGUF file.

    Args:
        path: the file, replaced if it exists.
        tokenizer: "gpt2" to store GPT-2's BPE; other tokenizers are not stored.
        name: value of general.name.

    Raises:
        WeightsError: the package gguf is missing, or the model is of another class.
        TokenizerUnavailable: the files of GPT-2's tokenizer are neither cached nor downloadable.
        OSError: the file cannot be written.
    """
    check_model("save_gguf", model, architecture.model)
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise WeightsError("GGUF files need the package gguf: pip install -e '.[gguf]'") from error
    writer = gguf.GGUFWriter(path, architecture.name)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(model.config.vocab_size)
    for key, value in architecture.metadata(model.config).items():
        if isinstance(value, int):
            writer.add_uint32(f"{architecture.name}.{key}", value)
        else:
            writer.add_float32(f"{architecture.name}.{key}", value)
    if tokenizer == GPT2Tokenizer.name:
        _add_gpt2_bpe(writer, gguf.TokenType, model.config.vocab_size)
    else:
        writer.add_tokenizer_model("none")
    for tensor, array in architecture.tensors(model):
        writer.add_tensor(tensor, np.ascontiguousarray(array, np.float32))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    finally:
        writer.close()


def _add_gpt2_bpe(writer: Any, kinds: Any, vocab_size: int) -> None:
    tokenizer = get_tokenizer(GPT2Tokenizer.name)
    assert isinstance(tokenizer, GPT2Tokenizer)
    tokens = tokenizer.token_bytes()
    unused = range(tokenizer.vocab_size, vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*map(text_of, tokens), EOT_TEXT, *(f"[PAD{id}]" for id in unused)])
    writer.add_token_types(
        [kinds.NORMAL] * len(tokens) + [kinds.CONTROL] + [kinds.UNUSED] * len(unused)
    )
    writer.add_token_merges([f"{text_of(a)} {text_of(b)}" for a, b in merges(tokens)])
    writer.add_bos_token_id(tokenizer.eot)
    writer.add_eos_token_id(tokenizer.eot)


def _gpt2_metadata(config) -> dict[str, int | float]:
    return {
        "block_count": config.n_layer,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "feed_forward_length": 4 * config.n_embd,
        "attention.head_count": config.n_head,
        "attention.layer_norm_epsilon": 1e-5,
    }


def _gpt2_tensors(model) -> Iterator[tuple[str, np.ndarray]]:
    params, config = host_arrays(model), model.config
    params[("wte",)] = params[("wte",)][: config.vocab_size]
    for kind in tensor_kinds(config):
        for key, name in kind.each():
            yield _gpt2_name(name), params[key].T if key[-1] == "kernel" else params[key]
    # The head is tied; llama.cpp before 2024 needs the head as a separate tensor.
    yield "output.weight", params[("wte",)]


def _gpt2_name(name: str) -> str:
    """Return "blk.0.attn_qkv.weight" for "h.0.attn.c_attn.weight"."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    _, layer, rest = name.split(".", 2)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{GGUF_BLOCK_NAMES[module]}.{kind}"


GPT2 = Architecture("gpt2", gpt2.GPT2, _gpt2_metadata, _gpt2_tensors)


LLAMA_NAMES: dict[Key, str] = {
    ("wte",): "token_embd",
    ("norm", "scale"): "output_norm",
    ("lm_head",): "output",
    ("norm_1", "scale"): "attn_norm",
    **{("attn", name, "kernel"): f"attn_{name}" for name in "qkv"},
    ("attn", "o", "kernel"): "attn_output",
    ("norm_2", "scale"): "ffn_norm",
    **{("mlp", name, "kernel"): f"ffn_{name}" for name in ("gate", "up", "down")},
}
"""Names of Llama's tensors in GGUF files, by the parameter's key, or by the key in a block."""


def _llama_metadata(config: Llama3Config) -> dict[str, int | float]:
    return {
        "block_count": config.n_layer,
        "context_length": config.block_size,
        "embedding_length": config.n_embd,
        "feed_forward_length": config.inner,
        "attention.head_count": config.n_head,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
    }


def _llama_tensors(model) -> Iterator[tuple[str, np.ndarray]]:
    """Yield llama.cpp's tensors. A tied head is not stored: llama.cpp then uses the embedding."""
    params, config = host_arrays(model), model.config
    if config.rope_scaling != 1:
        unscaled = frequencies(dataclasses.replace(config, rope_scaling=1.0))
        yield "rope_freqs.weight", unscaled / frequencies(config)
    for tensor in tensors_in(config):
        array, key = tensor.theirs(params[tensor.key]), tensor.key
        prefix = ""
        if key[0] == "blocks":
            prefix, key = f"blk.{key[1]}.", key[2:]
        if key in (("attn", "q", "kernel"), ("attn", "k", "kernel")):
            array = _interleaved(array, config.head_dim)
        yield f"{prefix}{LLAMA_NAMES[key]}.weight", array


def _interleaved(rows_OC: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows of each head in the order 0, D/2, 1, D/2 + 1, ….

    Source: `permute` in llama.cpp's convert_hf_to_gguf.py. For the architecture "llama", llama.cpp
    rotates channel 2i with channel 2i + 1; `gptjax.Llama3` rotates i with i + D/2.
    """
    rows_HPEC = rows_OC.reshape(-1, 2, head_dim // 2, rows_OC.shape[1])
    return rows_HPEC.swapaxes(1, 2).reshape(rows_OC.shape)


LLAMA = Architecture("llama", Llama3, _llama_metadata, _llama_tensors)
