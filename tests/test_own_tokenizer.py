"""A tokenizer.json from the preparation of a text to training, sampling and export."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import tokenizer_tools as tools
from gpt2_tools import build
from hf_tools import read_gguf, transformers
from llama_tools import ODD, random_of
from prepare_tools import prepare_texts, tokens_of

from gptjax.data import (
    DatasetError,
    Loader,
    PrepareError,
    ShardError,
    TokenizerUnavailable,
    find_dataset,
    get_tokenizer,
    open_shard,
    write_shard,
)
from gptjax.data import prepare as module
from gptjax.data.__main__ import main
from gptjax.export import export

KINDS = {"narrow": tools.llama3_kind, "wide": lambda: tools.with_ids(tools.llama3_kind(), 70_000)}


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i, text in enumerate(tools.TEXTS):
        (folder / f"{i:02}.txt").write_text(text)
    return folder


def write_tokenizer(path, tokenizer=None):
    (tokenizer or tools.llama3_kind()).save(str(path / "tokenizer.json"))
    return get_tokenizer(path)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tokenizer_travels_with_the_dataset(texts, tmp_path, capsys, kind):
    tokenizer = write_tokenizer(tmp_path, KINDS[kind]())
    data = ["--data-dir", str(tmp_path / "data"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main(["text", str(texts), *data]) == 0
    name = f"text_{tokenizer.name}"
    padded = -(-tokenizer.vocab_size // 128) * 128
    options = f"--model.vocab-size {tokenizer.vocab_size} --model.padded-vocab-size {padded}"
    assert options in capsys.readouterr().out
    dataset = find_dataset(name, tmp_path / "data")
    about = (dataset.tokenizer, dataset.vocab_size, dataset.eot)
    assert about == (tokenizer.name, tokenizer.vocab_size, tokenizer.eot)
    assert dataset.load_tokenizer().name == tokenizer.name and dataset.find_eot() == tokenizer.eot

    begin = [tokenizer.eot, *tokenizer.prefix]
    assert begin == [tokenizer.ids[tools.EOS], tokenizer.ids[tools.BOS]]
    tokens = np.concatenate([tokens_of(dataset.path, split) for split in ("train", "val")])
    documents = np.split(tokens, np.flatnonzero(tokens == tokenizer.eot))[1:]
    assert all(document[:2].tolist() == begin for document in documents)
    assert sorted(tokenizer.decode(each[2:]) for each in documents) == sorted(tools.TEXTS)

    wide = kind == "wide"
    header = np.fromfile(dataset.train[0], "<i4", 2).tolist()
    assert header == ([20240801, 7] if wide else [20240520, 1])
    assert open_shard(dataset.train[0]).dtype == (np.uint32 if wide else np.uint16)
    dataset.validate(tokenizer.vocab_size, 32)
    most = int(tokens.max())
    with pytest.raises(ShardError, match=f"vocabulary of {most}, found id {most}"):
        dataset.validate(most, 32)
    with Loader(dataset.train, sequence_length=32, batch=2, seed=0, vocab_size=70_000) as loader:
        assert next(loader).inputs.dtype == np.int32
    assert main(["check", str(dataset.path)]) == 0


def test_another_tokenizer_is_noticed(texts, tmp_path):
    write_tokenizer(tmp_path)
    options = {"name": "own", "tokenizer": str(tmp_path)}
    made = prepare_texts(texts, tmp_path / "data", **options)
    with pytest.raises(PrepareError, match="own holds something else: .*'eot': "):
        prepare_texts(texts, tmp_path / "data", **options, eot="<|eot_id|>")
    with pytest.raises(DatasetError, match="'byte', found 'json-.*--model.vocab-size"):
        find_dataset("own", tmp_path / "data", "byte")
    with pytest.raises(DatasetError, match="prepared with the tokenizer json-1, found stdlib"):
        find_dataset("stdlib", tmp_path / "data", "json-1")
    tools.gpt2_kind().save(str(made / "tokenizer.json"))
    with pytest.raises(
        DatasetError, match="expected the tokenizer json-.*, found json-.*; restore"
    ):
        find_dataset("own", tmp_path / "data").load_tokenizer()
    (made / "tokenizer.json").unlink()
    with pytest.raises(DatasetError, match="expected the tokenizer json-.*, found no file"):
        find_dataset("own", tmp_path / "data").load_tokenizer()
    content = json.loads((made / "dataset.json").read_text())
    (made / "dataset.json").write_text(json.dumps(content | {"tokenizer": "gpt5"}))
    with pytest.raises(DatasetError, match="tokenizer 'gpt5'"):
        find_dataset("own", tmp_path / "data")


def test_shards_of_other_programs_may_have_a_tokenizer_json_beside_them(tmp_path):
    tokens = np.arange(300) % 256
    for split in ("train", "val"):
        write_shard(tmp_path / f"a_{split}_000000.bin", tokens, vocab_size=128_256)
    dataset = find_dataset(str(tmp_path), tmp_path)
    assert (dataset.tokenizer, dataset.find_eot()) == ("unknown", None)
    assert "the tokenizer of uint32 ids is unknown" in dataset.note
    with pytest.raises(DatasetError, match="expected the tokenizer unknown, found no file"):
        dataset.load_tokenizer()
    tokenizer = write_tokenizer(tmp_path)
    dataset = find_dataset(str(tmp_path), tmp_path)
    assert (dataset.tokenizer, dataset.eot) == (tokenizer.name, tokenizer.eot)
    assert "assuming the tokenizer of its tokenizer.json" in dataset.note


STRANGE = (
    "a\n\nb  \n c\n\n\nd\r\ne \nf\ng\u2028\nh\n\u00a0i\n" * 40
    + "don't\nstop   \n\n   \nnow 's\n'll\n" * 40
)


@pytest.mark.parametrize("kind", [None, tools.gpt2_kind, tools.llama3_kind, tools.llama2_kind])
def test_a_long_document_has_the_tokens_of_the_whole(tmp_path, monkeypatch, kind):
    """Of GPT-2's own BPE, and of a tokenizer.json. SentencePiece's kind adds a space before each
    text: its documents are not cut."""
    monkeypatch.setattr(module, "_PIECE_CHARACTERS", 7)
    try:
        tokenizer = get_tokenizer("gpt2") if kind is None else write_tokenizer(tmp_path, kind())
    except TokenizerUnavailable as error:
        pytest.skip(str(error))
    text = Path(module.__file__).read_text(encoding="utf-8") + STRANGE + "".join(tools.TEXTS)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text(text)
    (tmp_path / "texts" / "b.txt").write_text("b")
    name = tokenizer.name if kind is None else str(tmp_path)
    made = prepare_texts(tmp_path / "texts", tmp_path / "data", tokenizer=name)
    begin = [tokenizer.eot, *tokenizer.prefix]
    assert tokens_of(made, "train").tolist() == [*begin, *tokenizer.encode(text)]
    assert module._can_cut(tokenizer) == (kind is not tools.llama2_kind)


@pytest.mark.parametrize(
    ("kind", "pre"),
    [(tools.gpt2_kind, "gpt-2"), (tools.llama3_kind, "llama-bpe"), (tools.llama2_kind, None)],
)
def test_export_with_a_tokenizer_json(tmp_path, kind, pre):
    """The metadata of GGUF are those of llama.cpp's conversion of the Hugging Face folder."""
    tokenizer = write_tokenizer(tmp_path, kind())
    config = dataclasses.replace(ODD, vocab_size=402, padded_vocab_size=None)
    model = build(config, random_of(config))
    said = export(model, tmp_path / "m.gguf", "gguf", tokenizer=tokenizer)
    assert said.startswith("only the model" if pre is None else "with the tokenizer json-")
    fields, _ = read_gguf(tmp_path / "m.gguf")
    part = lambda name, *at: fields(f"tokenizer.ggml.{name}", *at)
    if pre is None:
        assert part("model") == "none"
    else:
        assert (part("model"), part("pre")) == ("gpt2", pre)
        tokens = [part("tokens", id) for id in range(402)]
        unused = range(tokenizer.vocab_size, 402)
        assert {tokens[id]: id for id in range(unused.start)} == tokenizer.ids
        assert tokens[unused.start :] == [f"[PAD{id}]" for id in unused] and len(unused) > 1
        special = {*tokenizer.special.values()}
        types = [3 if id in special else 1 for id in range(unused.start)]
        assert part("token_type") == types + [5] * len(unused)
        merges = [" ".join(pair) for pair in tokenizer.fields["model"]["merges"]]
        assert part("merges") == merges and len(merges) > 50
        begin = tokenizer.ids.get(tools.BOS, tokenizer.eot)
        assert (part("bos_token_id"), part("eos_token_id")) == (begin, tokenizer.eot)
        assert part("add_bos_token") == (tools.BOS in tokenizer.ids)

    export(model, tmp_path / "hf", "hf", tokenizer=tokenizer)
    found = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "document 7 is a naïve word 🙂\n"
    assert found.encode(text) == [*tokenizer.prefix, *tokenizer.encode(text)]
    assert found.eos_token_id == tokenizer.eot
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.eot
