"""gptjax.data.corpora: the documents of each source, and the errors."""

import hashlib
import importlib
import io
import json
import sys
import sysconfig
import unittest.mock
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from gptjax.data import CorpusError, corpora


def texts(corpus):
    documents = list(corpus.documents())
    assert len(documents) == corpus.measure().size and corpus.measure().min() > 0
    return documents


def test_stdlib_excludes_folders_that_some_installations_lack(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(CorpusError, match="expected the .py sources .*gptjax.data text PATH"):
        corpora.stdlib()
    kept = ["abc.py", "json/decoder.py", "json/tool.py"]
    left_out = [
        *("site-packages/numpy.py", "test/test_abc.py", "json/tests/t.py", "idlelib/run.py"),
        *("lib2to3/main.py", "config-3.12-x86_64-linux-gnu/python-config.py", "a.txt"),
        *("_sysconfigdata__linux_.py", "__pycache__/a.py"),
    ]
    for name in [*left_out, *reversed(kept)]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    (tmp_path / "zlatin.py").write_bytes(b"caf\xe9")
    assert texts(corpora.stdlib()) == [*kept, "caf\ufffd"]


def test_text_reads_files_folders_and_globs_once_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ["b.txt", "a.txt", "in/d.txt", "in/deep/c.md", "in/.hidden/x.txt", "in/.y.txt"]:
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(name)
    Path("in/empty.txt").touch()
    for paths, expected in (
        (["b.txt", "a.txt"], ["b.txt", "a.txt"]),
        (["in"], ["in/d.txt", "in/deep/c.md"]),
        (["**/*.txt"], ["a.txt", "b.txt", "in/d.txt"]),
        (["in/deep/c.md", "in", "*.txt"], ["in/deep/c.md", "in/d.txt", "a.txt", "b.txt"]),
        ([Path()], ["a.txt", "b.txt", "in/d.txt", "in/deep/c.md"]),
    ):
        assert texts(corpora.text(paths)) == expected
    Path("b.txt").write_bytes("é\r\n\n🙂 \n".encode())
    assert texts(corpora.text(["b.txt"])) == ["é\r\n\n🙂 \n"]


@pytest.mark.parametrize(
    ("corpus", "paths", "says"),
    [
        (corpora.text, ["no.txt"], "no.txt': expected a file, a folder .* a glob .* found nothing"),
        (corpora.text, ["empty.txt"], "empty.txt: expected files with text, found nothing but emp"),
        (corpora.text, ["latin.txt"], "latin.txt: at byte 3: expected UTF-8 text, found 0xe9; con"),
        (corpora.text, ["latin.txt", ""], "'': expected a file"),  # not the current folder
        (corpora.jsonl, ["empty.txt", ""], "'': expected a file"),
        (partial(corpora.jsonl, prompt_field="q"), ["empty.txt"], "a prompt field and an answer"),
    ],
)
def test_a_path_without_text_is_an_error(tmp_path, monkeypatch, corpus, paths, says):
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").touch()
    Path("latin.txt").write_bytes(b"caf\xe9!")
    with pytest.raises(CorpusError, match=says):
        texts(corpus(paths))


def test_jsonl_yields_the_field_of_every_line(tmp_path):
    rows = ["one", "", "zwei ü", "three\nlines"]
    lines = [json.dumps({"body": row, "id": 1}) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines) + "\n\n")
    corpus = corpora.jsonl([tmp_path / "a.jsonl"], field="body")
    assert [*corpus.documents()] == rows
    sizes = [len(line) if row else 0 for row, line in zip(rows, lines, strict=True)]
    np.testing.assert_array_equal(corpus.measure(), sizes)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "caf\xe9"}', r"a JSON object, found .* .*can't decode"),
        (b'{"title": "x", "id": 2}', "a text in .*, found NoneType; the fields are title, id"),
        (b"[1]", r"a text in the field 'text' .option --field., found list"),
        (b'{"text": 5}', "a text in the field 'text' .option --field., found int"),
        (b"[" * 200_000, r"a JSON object, found b'\[\[\["),
    ],
)
def test_a_bad_line_is_an_error_with_its_number(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "two"}\n')
    with pytest.raises(CorpusError, match=f"a.jsonl, line 3: expected {message}"):
        corpora.jsonl([tmp_path / "a.jsonl"]).measure()


@pytest.mark.parametrize("content", ["\n\n", '{"text": ""}\n' * 3])
def test_jsonl_without_texts_is_an_error(tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    says = "a.jsonl: expected lines of JSON with texts in field 'text', found none"
    with pytest.raises(CorpusError, match=says):
        corpora.jsonl([tmp_path / "a.jsonl"]).measure()


def test_tinyshakespeare_comes_from_a_file_or_the_network(tmp_path, monkeypatch):
    play = b"First Citizen:\nSpeak.\n"
    (tmp_path / "input.txt").write_bytes(play)
    assert texts(corpora.tinyshakespeare(tmp_path / "input.txt")) == [play.decode()]
    fetched, answer = [], io.BytesIO(play)
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_SHA256", hashlib.sha256(play).hexdigest())
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda url, timeout: fetched.append(url) or answer
    )
    downloaded = corpora.tinyshakespeare()
    assert not fetched
    assert texts(downloaded) == [play.decode()]
    assert len(fetched) == 1 and "karpathy/char-rnn" in fetched[0]


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (urllib.error.URLError("no route to host"), "no route to host"),
        (io.BytesIO(b"<html>log in first"), "expected SHA-256 86c4e6aa.* found"),
    ],
)
def test_tinyshakespeare_without_a_network_is_an_error(monkeypatch, answer, found):
    urlopen = unittest.mock.Mock(side_effect=[answer])
    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    says = f"could not download https.*{found}.*--file PATH.*gptjax.data stdlib"
    with pytest.raises(CorpusError, match=says):
        corpora.tinyshakespeare().measure()


# ----------------------------------------------------------------------------------------- streams

ROWS = [{"id": i, "body": f"row {i} é"} for i in range(5)]


def test_rows_are_read_as_a_stream():
    corpus = corpora.rows(iter(ROWS), "body", source="five rows", count=3)
    assert corpus.measure is None and corpus.source == "five rows (field 'body', 3 rows)"
    assert [*corpus.documents()] == ["row 0 é", "row 1 é", "row 2 é"]
    with pytest.raises(CorpusError, match="five .* row 1: .*'text'.* NoneType; the .* id, body"):
        [*corpora.rows(ROWS, source="five rows").documents()]
    with pytest.raises(CorpusError, match="row 1: expected a text in the field 'id' .* found int"):
        [*corpora.rows(ROWS, "id", source="five rows").documents()]


def test_a_dataset_of_the_hub_is_streamed(monkeypatch):
    calls = []

    def load_dataset(name, subset, *, split, streaming):
        calls.append((name, subset, split, streaming))
        if name == "no":
            raise ConnectionError("no route to host")
        return ROWS

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    corpus = corpora.hub("me/mine", "body", subset="small", count=2)
    assert [*corpus.documents()] == ["row 0 é", "row 1 é"]
    assert calls == [("me/mine", "small", "train", True)]
    assert corpus.source == "datasets: me/mine small train (field 'body', 2 rows)"
    with pytest.raises(CorpusError, match="datasets: no train: ConnectionError: no route"):
        corpora.hub("no")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(CorpusError, match=r"pip install 'gptjax\[datasets\]'"):
        corpora.hub("me/mine")


def test_parquet_files_are_streamed(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow", reason="the package pyarrow is in the extra `parquet`")
    pq = importlib.import_module("pyarrow.parquet")
    for name, part in (("a", ROWS[:3]), ("b", ROWS[3:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / f"{name}.parquet", row_group_size=2)
    corpus = corpora.of_files([tmp_path], "body")
    assert corpus.source == f"parquet: {tmp_path} (field 'body')"
    assert [*corpus.documents()] == [row["body"] for row in ROWS]
    with pytest.raises(CorpusError, match="a.parquet, row 1: .*'text'.* the fields are id, body"):
        [*corpora.parquet([tmp_path]).documents()]
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(CorpusError, match="c.parquet: "):
        [*corpora.parquet([tmp_path / "c.parquet"]).documents()]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(CorpusError, match=r"pip install 'gptjax\[parquet\]'"):
        corpora.parquet([tmp_path])


def test_the_suffix_decides_how_files_are_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}')
    (tmp_path / "b.txt").write_text("b")
    assert [*corpora.of_files([tmp_path / "a.jsonl"], "body").documents()] == ["a"]
    assert [*corpora.of_files([tmp_path]).documents()] == ['{"body": "a"}', "b"]
