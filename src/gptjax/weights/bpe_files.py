"""GPT-2's tokenizer as a tokenizer.json: vocabulary and merges, derived from tiktoken's tokens.

tiktoken stores only the bytes of each token. The ids are in the order of the merges. Hence
byte-pair encoding with all smaller ids splits the bytes of a token into its two parts.
"""

import json
from pathlib import Path
from typing import Any

from gptjax.data.tokenizers import (
    BYTES,
    EOT_TEXT,
    TOKENIZER_CONFIG,
    TOKENIZER_JSON,
    AnyTokenizer,
    JsonTokenizer,
    byte_characters,
)


def text_of(token: bytes) -> str:
    """Return a token as GPT-2's files write it: b" the" is "Ġthe"."""
    return "".join(byte_characters()[byte] for byte in token)


def merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the two parts of each token of more than one byte, in the order of the ids.

    Args:
        tokens: bytes of each id. The first 256 are single bytes.
    """
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return [_parts(token, ranks) for token in tokens[BYTES:]]


def _parts(token: bytes, ranks: dict[bytes, int]) -> tuple[bytes, bytes]:
    """Apply all earlier merges to the bytes of a token until two parts remain."""
    parts, none = [bytes([byte]) for byte in token], len(ranks)
    while len(parts) > 2:
        pairs = [ranks.get(a + b, none) for a, b in zip(parts, parts[1:], strict=False)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
    first, second = parts
    return first, second


def fields_of(tokenizer: AnyTokenizer) -> dict[str, Any]:
    """Return the contents of the tokenizer.json: GPT-2's BPE, and bytes without merges, derived."""
    if isinstance(tokenizer, JsonTokenizer):
        return tokenizer.fields
    tokens = tokenizer.token_bytes[: tokenizer.eot]
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    byte_level |= {"use_regex": len(tokens) > BYTES}
    vocabulary = {text_of(token): id for id, token in enumerate(tokens)}
    pairs = [f"{text_of(a)} {text_of(b)}" for a, b in merges(tokens)]
    return {
        "version": "1.0",
        "added_tokens": [{"id": tokenizer.eot, "content": EOT_TEXT, "special": True} | special],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary | {EOT_TEXT: tokenizer.eot}, "merges": pairs},
    }


def save_tokenizer(tokenizer: AnyTokenizer, folder: Path, block_size: int) -> None:
    """Write a tokenizer and generation_config.json, so that `transformers` reads them offline.

    Args:
        folder: an existing folder.
        block_size: maximum length of a sequence.
    """
    if isinstance(tokenizer, JsonTokenizer):
        tokenizer.save(folder)
    else:
        config = {"bos_token": EOT_TEXT, "eos_token": EOT_TEXT, "unk_token": EOT_TEXT}
        config |= {"add_prefix_space": False, "model_max_length": block_size}
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        _write_json(folder / TOKENIZER_JSON, fields_of(tokenizer))
        _write_json(folder / TOKENIZER_CONFIG, config)
    begin, end = (*tokenizer.prefix, tokenizer.eot)[0], tokenizer.eot
    ends = {"bos_token_id": begin, "eos_token_id": end, "pad_token_id": end}
    _write_json(folder / "generation_config.json", ends)


def _write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, ensure_ascii=False) + "\n", encoding="utf-8")
