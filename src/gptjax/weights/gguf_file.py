"""GGUF files (llama.cpp), fp32, written with the package `gguf`.

Names, metadata and transposes equal the result of llama.cpp's conversion of a Hugging Face model.
Matrices are (out, in), the transpose of gptjax's kernels. The vocabulary is stored without padding.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np

from gptjax.data.tokenizers import EOT_TEXT, GPT2Tokenizer, get_tokenizer
from gptjax.models.base import Model
from gptjax.models.llama3 import frequencies
from gptjax.weights.architectures import ARCHITECTURES, Architecture, of_config
from gptjax.weights.bpe_files import merges, text_of
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import replacing
from gptjax.weights.params import check_model, host_arrays


def save_gguf(model: Model, path: Path, *, tokenizer: str | None, name: str) -> None:
    """Write a model as a GGUF file. The file is written atomically.

    Args:
        path: the file.
        tokenizer: "gpt2" to store GPT-2's BPE; other tokenizers are not stored.
        name: value of general.name.

    Raises:
        WeightsError: the package gguf is missing, the model is of another class or a subclass, or
            the file cannot be written.
        TokenizerUnavailable: the files of GPT-2's tokenizer are neither cached nor downloadable.
    """
    check_model("save_gguf", model, *(each.model for each in ARCHITECTURES.values()))
    try:
        import gguf
    except ModuleNotFoundError as error:
        raise WeightsError("GGUF files need the package gguf: pip install -e '.[gguf]'") from error
    config: Any = model.config
    architecture = of_config(config)
    writer = gguf.GGUFWriter(None, architecture.name)
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
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
    if tokenizer == GPT2Tokenizer.name:
        _add_gpt2_bpe(writer, gguf.TokenType, config.vocab_size)
    else:
        writer.add_tokenizer_model("none")
    for tensor, array in _tensors(model, architecture):
        writer.add_tensor(tensor, np.ascontiguousarray(array, np.float32))
    with replacing(path) as temporary:
        try:
            writer.write_header_to_file(temporary)
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
