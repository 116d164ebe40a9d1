"""Small tokenizer.json files of the kinds that published models have."""

import json

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer

from gptjax.weights.gguf_file import LLAMA_3

TEXTS = [f"document {i}.\nThe naïve word ü is number {i * i}, don't stop.\n" for i in range(60)]
BOS, EOS = "<|begin_of_text|>", "<|end_of_text|>"


def _train(tokenizer, special, vocab_size=400):
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(TEXTS, BpeTrainer(vocab_size=vocab_size, **options))
    return tokenizer


def gpt2_kind(special=("<|endoftext|>",)):
    """Byte-level BPE with GPT-2's pre-tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _train(tokenizer, [*special])


def llama3_kind():
    """Byte-level BPE with Llama 3's pre-tokenizer and begin-of-text token."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    _train(tokenizer, [BOS, EOS, "<|eot_id|>"])
    template = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def llama2_kind():
    """SentencePiece's kind: a space before each text, and bytes for unknown characters."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abcdefghijklmno"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "c")]
    vocab += ["".join(pair) for pair in merges]
    ids = {token: i for i, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_ids(tokenizer, ids):
    """The same tokenizer with an additional token whose id is the last of `ids`."""
    fields = json.loads(tokenizer.to_str())
    last = {"id": ids - 1, "content": "<|reserved|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    fields["model"]["vocab"]["<|reserved|>"] = ids - 1
    fields["added_tokens"].append(last | flags)
    return Tokenizer.from_str(json.dumps(fields))
