"""gptjax.data.corpora: the documents of each source, and the errors."""

import hashlib
import io
import json
import re
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gptjax.data import CorpusError, corpora


def texts(corpus):
    documents = list(corpus.documents())
    assert len(documents) == corpus.measure().size and corpus.measure().min() > 0
    return documents


def test_stdlib_is_the_running_pythons_own_sources():
    corpus = corpora.stdlib()
    root = Path(sysconfig.get_path("stdlib"))
    documents = texts(corpus)
    assert corpus.measure().sum() > 3e6
    assert (root / "argparse.py").read_text(encoding="utf-8") in documents
    assert documents == texts(corpora.stdlib())


def test_stdlib_excludes_folders_that_some_installations_lack(tmp_path, monkeypatch):
    kept = ["abc.py", "json/decoder.py", "json/tool.py"]
    left_out = [
        "site-packages/numpy.py",
        "test/test_abc.py",
        "json/tests/t.py",
        "idlelib/run.py",
        "lib2to3/main.py",
        "config-3.12-x86_64-linux-gnu/python-config.py",
        "_sysconfigdata__linux_.py",
        "__pycache__/a.py",
        "a.txt",
    ]
    for name in [*left_out, *reversed(kept)]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "empty.py").touch()
    (tmp_path / "zlatin.py").write_bytes(b"caf\xe9")
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    assert texts(corpora.stdlib()) == [*kept, "caf\ufffd"]


def test_a_python_without_sources_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    with pytest.raises(
        CorpusError, match="expected the .py sources .* found none .*gptjax.data text PATH"
    ):
        corpora.stdlib()


def test_text_reads_files_folders_and_globs_once_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ["b.txt", "a.txt", "in/d.txt", "in/deep/c.md", "in/.hidden/x.txt", "in/.y.txt"]:
        Path(name).parent.mkdir(exist_ok=True, parents=True)
        Path(name).write_text(name)
    Path("in/empty.txt").touch()
    assert texts(corpora.text(["b.txt", "a.txt"])) == ["b.txt", "a.txt"]
    assert texts(corpora.text(["in"])) == ["in/d.txt", "in/deep/c.md"]
    assert texts(corpora.text(["**/*.txt"])) == ["a.txt", "b.txt", "in/d.txt"]
    assert texts(corpora.text(["in/deep/c.md", "in", "*.txt"])) == [
        "in/deep/c.md",
        "in/d.txt",
        "a.txt",
        "b.txt",
    ]


def test_text_keeps_every_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\r\n\n🙂 \n".encode())
    assert texts(corpora.text([tmp_path / "a.txt"])) == ["é\r\n\n🙂 \n"]


def test_a_missing_file_or_one_that_is_not_text_is_an_error(tmp_path):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9!")
    with pytest.raises(
        CorpusError, match="no.txt: expected a file, a folder of files or a glob .* found nothing"
    ):
        corpora.text([tmp_path / "no.txt"])
    with pytest.raises(CorpusError, match="empty.txt: expected .* found nothing but empty files"):
        corpora.text([tmp_path / "empty.txt"])
    with pytest.raises(
        CorpusError, match="latin.txt: at byte 3: expected UTF-8 text, found 0xe9; convert"
    ):
        texts(corpora.text([tmp_path / "latin.txt"]))


def test_jsonl_yields_the_field_of_every_line(tmp_path):
    rows = ["one", "zwei ü", "three\nlines"]
    (tmp_path / "a.jsonl").write_text(
        "\n".join(json.dumps({"body": row, "id": 1}) for row in rows) + "\n\n"
    )
    assert texts(corpora.jsonl([tmp_path / "a.jsonl"], field="body")) == rows


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{oops", "a.jsonl, line 3: expected a JSON object, found b'{oops'"),
        (b'{"text": "caf\xe9"}', "a.jsonl, line 3: expected a JSON object"),
        (
            b'{"title": "x", "id": 2}',
            "a.jsonl, line 3: expected an object with text in the field 'text', found the "
            "fields 'title', 'id'",
        ),
        (
            b"[1]",
            r"a.jsonl, line 3: expected an object with text in the field 'text', found b'\[1\]",
        ),
        (
            b'{"text": 5}',
            "a.jsonl, line 3: expected .* text in the field 'text', found int in it; .*--field",
        ),
        (
            b'{"text": null}',
            "line 3: .* text in .*'text', found NoneType in it; .*--field .*--skip-bad-lines",
        ),
        (b"[" * 200_000, r"a.jsonl, line 3: expected a JSON object, found b'\[\[\["),
    ],
)
def test_a_bad_line_is_an_error_with_its_number_before_any_text_is_used(tmp_path, line, says):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n\n' + line + b'\n{"text": "two"}\n{oops')
    with pytest.raises(CorpusError, match=says):
        corpora.jsonl([tmp_path / "a.jsonl"]).measure()
    said = []
    corpus = corpora.jsonl([tmp_path / "a.jsonl"], skip_bad_lines=True, log=said.append)
    assert texts(corpus) == ["fine", "two"]
    assert said[0].startswith("NOTE: skipped 2 bad lines, kept 2; the first: ") and re.search(
        says, said[0]
    )
    assert corpus.measure().tolist() == [len('{"text": "fine"}'), len('{"text": "two"}')]


def test_jsonl_of_bad_lines_only_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("1\n2\n")
    with pytest.raises(CorpusError, match="a.jsonl: expected lines of JSON, found only bad lines"):
        corpora.jsonl([tmp_path / "a.jsonl"], skip_bad_lines=True, log=str).measure()


def test_the_digest_of_the_documents_tells_texts_apart():
    same = corpora.digest(iter(["one", "two"]))
    assert same == corpora.digest(iter(["one", "two"]))
    others = [["onetwo"], ["one", "twO"], ["two", "one"], ["one", "two", ""], ["one\ud800", "two"]]
    assert len({same, *(corpora.digest(iter(other)) for other in others)}) == 6


def test_jsonl_without_lines_is_an_error(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(
        CorpusError, match="a.jsonl: expected lines of JSON, found only empty files"
    ):
        corpora.jsonl([tmp_path / "a.jsonl"]).measure()


def test_an_empty_text_of_jsonl_has_no_size(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n')
    corpus = corpora.jsonl([tmp_path / "a.jsonl"])
    assert corpus.measure().tolist() == [len('{"text": "one"}'), 0]
    assert [*corpus.documents()] == ["one", ""]
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 3)
    with pytest.raises(
        CorpusError, match="a.jsonl: expected lines of JSON, found only empty texts; .*--field"
    ):
        corpora.jsonl([tmp_path / "a.jsonl"]).measure()


def test_an_empty_path_is_an_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    for corpus in (corpora.text, corpora.jsonl):
        with pytest.raises(
            CorpusError, match="a folder or a glob, found an empty path; .*variable"
        ):
            corpus(["a.txt", ""])
    assert texts(corpora.text([Path()])) == ["text"]


def test_tinyshakespeare_comes_from_a_file_or_the_network(tmp_path, monkeypatch):
    play = b"First Citizen:\nSpeak.\n"
    (tmp_path / "input.txt").write_bytes(play)
    assert texts(corpora.tinyshakespeare(tmp_path / "input.txt")) == [play.decode()]

    fetched = []
    monkeypatch.setattr(corpora, "_TINYSHAKESPEARE_SHA256", hashlib.sha256(play).hexdigest())
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda url, timeout: fetched.append(url) or io.BytesIO(play)
    )
    downloaded = corpora.tinyshakespeare()
    # Known without the download, and equal to the file's.
    assert downloaded.digest == corpora.digest(
        corpora.tinyshakespeare(tmp_path / "input.txt").documents()
    )
    assert not fetched
    assert texts(downloaded) == [play.decode()]
    assert len(fetched) == 1 and "karpathy/char-rnn" in fetched[0]


def test_tinyshakespeare_without_a_network_or_with_a_damaged_download_is_an_error(monkeypatch):
    def refuse(url, timeout):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    with pytest.raises(
        CorpusError,
        match="could not download https.*no route to host.*--file PATH.*gptjax.data stdlib",
    ):
        corpora.tinyshakespeare().measure()
    monkeypatch.setattr(
        urllib.request, "urlopen", lambda url, timeout: io.BytesIO(b"<html>log in first")
    )
    with pytest.raises(
        CorpusError, match=r"expected SHA-256 86c4e6aa.*, found .* \(18 bytes\).*--file PATH"
    ):
        corpora.tinyshakespeare().measure()
