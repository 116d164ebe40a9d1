"""Sources of documents: Python's standard library, Tiny Shakespeare, text files, JSON lines.

A `Corpus` measures all documents before it yields the first, so that the split into training and
validation is known at the start. It yields the texts one by one, so that a corpus need not fit in
memory.
"""

import array
import dataclasses
import functools
import glob
import hashlib
import json
import os
import platform
import sysconfig
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gptjax.data.errors import DataError

TINYSHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
_TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

_BAD_LINE_ADVICE = "correct or remove the line, or skip such lines with --skip-bad-lines"

# Folders that some installations of Python lack (tests, tools), or that are not part of Python.
_STDLIB_EXCLUDED = {
    *("site-packages", "dist-packages", "test", "tests"),
    *("idlelib", "lib2to3", "__pycache__"),
}


class CorpusError(DataError, ValueError):
    """Text that does not exist or cannot be read as text."""


class Pair(NamedTuple):
    """A document of two texts, of which only the answer counts for the loss."""

    prompt: str
    answer: str


type Document = str | Pair


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order.

    Attributes:
        source: description of the origin, for dataset.json.
        measure: returns the size of each document in bytes, int64 of shape (documents,): at least
            one size above 0. The size of an empty document is 0.
        documents: returns a new iterator over the documents that `measure` counts: texts or, with
            `masked`, pairs.
        digest: `digest` of the documents if known without reading them, else None.
        masked: whether the documents are pairs.
    """

    source: str
    measure: Callable[[], np.ndarray]
    documents: Callable[[], Iterator[Document]]
    digest: str | None = None
    masked: bool = False


def digest(documents: Iterator[Document]) -> str:
    """Return the SHA-256 of the SHA-256 digests of all documents, in order."""
    total = hashlib.sha256()
    for _ in hashed(documents, total):
        pass
    return total.hexdigest()


def hashed(documents: Iterator[Document], total: "hashlib._Hash") -> Iterator[Document]:
    """Yield each document after updating `total` with the document's SHA-256."""
    for document in documents:
        if isinstance(document, Pair):  # JSON tells ("a", "bc") from ("ab", "c")
            content = json.dumps(document).encode()
        else:
            content = document.encode(errors="surrogatepass")
        total.update(hashlib.sha256(content).digest())
        yield document


def stdlib() -> Corpus:
    """Return the sources of the running Python's standard library, one document for each file."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [
            name
            for name in folders
            if name not in _STDLIB_EXCLUDED and not name.startswith("config-")
        ]
        sources = (
            name for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        )
        paths += [path for path in (Path(folder, name) for name in sources) if path.stat().st_size]
    if not paths:
        raise CorpusError(
            f"{root}: expected the .py sources of Python's standard library, found none (a Python "
            "without sources?); prepare another text: `python -m gptjax.data text PATH...`"
        )
    paths.sort(key=lambda path: path.relative_to(root).parts)
    # A file in another encoding must not make the default corpus unusable: replace its bytes that
    # are not UTF-8.
    return _files(f"Python {platform.python_version()} standard library", paths, errors="replace")


def tinyshakespeare(file: str | os.PathLike | None = None) -> Corpus:
    """Return Shakespeare's plays (1.1 MB, one document), from `file` or downloaded."""
    if file is not None:
        return dataclasses.replace(text([file]), source="tinyshakespeare")
    download = functools.cache(_download_tinyshakespeare)
    return Corpus(
        "tinyshakespeare",
        lambda: np.array([len(download())]),
        lambda: iter([download().decode()]),
        digest=hashlib.sha256(bytes.fromhex(_TINYSHAKESPEARE_SHA256)).hexdigest(),
    )


def _download_tinyshakespeare() -> bytes:
    try:
        with urllib.request.urlopen(TINYSHAKESPEARE_URL, timeout=20) as response:
            content = response.read()
    except OSError as error:  # URLError, timeouts and broken connections are OSErrors
        raise CorpusError(
            f"could not download {TINYSHAKESPEARE_URL} ({error}); fetch it on a machine with a "
            "network and pass `--file PATH`, or use the corpus that needs no network: `python -m "
            "gptjax.data stdlib`"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != _TINYSHAKESPEARE_SHA256:
        raise CorpusError(
            f"{TINYSHAKESPEARE_URL}: expected SHA-256 {_TINYSHAKESPEARE_SHA256}, found {found} "
            f"({len(content)} bytes); the download is damaged or comes from another server, such "
            "as a proxy: try again, or pass `--file PATH`"
        )
    return content


def text(paths: Sequence[str | os.PathLike]) -> Corpus:
    """Return UTF-8 text files as a corpus, one document for each file. Empty files are skipped.

    Args:
        paths: files, folders (all files at any depth except hidden files) and globs, including
            `**`.
    """
    files: dict[Path, None] = {}  # a set that keeps its order
    for given in paths:
        found = [path for path in _expand(given) if path.stat().st_size]
        if not found:
            raise CorpusError(
                f"{given}: expected a file, folder or glob with text in it, found nothing but "
                "empty files"
            )
        files.update(dict.fromkeys(found))
    return _files("text: " + " ".join(os.fspath(path) for path in paths), list(files))


def jsonl(
    paths: Sequence[str | os.PathLike],
    field: str = "text",
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    separator: str = "\n",
    skip_bad_lines: bool = False,
    log: Callable[[str], object] = print,
) -> Corpus:
    """Return JSON lines as a corpus, one document or pair for each line. Blank lines are skipped.

    Args:
        paths: files, folders and globs, see `text`.
        field: field of each line's object that holds the text.
        prompt_field, answer_field: fields that hold the two texts of a pair, in place of `field`.
            An empty answer is an error.
        separator: end of each prompt.
        skip_bad_lines: skip lines without a text in the field; `measure` logs the number of skipped
            lines and the first skipped line. If False, `measure` raises CorpusError at the first
            bad line, before tokenizing.
        log: called with each message for the user.
    """
    files = list(dict.fromkeys(path for given in paths for path in _expand(given)))
    shown, fields = " ".join(map(os.fspath, paths)), f"field {field!r}"
    if prompt_field:
        fields = f"prompts {prompt_field!r}, answers {answer_field!r}, separator {separator!r}"

    def read(line: bytes, where: str) -> Document:
        if not prompt_field or not answer_field:
            return _field_of(line, field, where, "--field")
        prompt = _field_of(line, prompt_field, where, "--prompt-field")
        if not (answer := _field_of(line, answer_field, where, "--answer-field")):
            raise CorpusError(
                f"{where}: expected a text in the field {answer_field!r}, found an empty one; "
                f"{_BAD_LINE_ADVICE}"
            )
        return Pair(prompt + separator, answer)

    def rows() -> Iterator[tuple[int, Document | CorpusError]]:
        for path, number, line in _lines(files):
            try:
                document = read(line, f"{path}, line {number}")
            except CorpusError as error:
                if not skip_bad_lines:
                    raise
                document = error
            # An empty text has no tokens, and would fill the validation split with nothing.
            yield len(line) if document else 0, document

    def measure() -> np.ndarray:
        sizes, bad, first_bad = array.array("q"), 0, None
        for size, document in rows():
            if isinstance(document, CorpusError):
                bad, first_bad = bad + 1, first_bad or document
            else:
                sizes.append(size)
        if bad:
            log(f"NOTE: skipped {bad:,} bad lines, kept {len(sizes):,}; the first: {first_bad}")
        if not any(sizes):
            found = "bad lines" if bad else "empty files"
            if sizes:
                found = "empty texts; name another field with --field NAME"
            raise CorpusError(f"{shown}: expected lines of JSON, found only {found}")
        return np.array(sizes)

    def documents() -> Iterator[Document]:
        return (document for _, document in rows() if not isinstance(document, CorpusError))

    source = f"jsonl: {shown} ({fields}{', without bad lines' if skip_bad_lines else ''})"
    return Corpus(source, measure, documents, masked=prompt_field is not None)


def _files(source: str, paths: list[Path], errors: str = "strict") -> Corpus:
    def documents() -> Iterator[str]:
        for path in paths:
            try:
                yield path.read_bytes().decode(errors=errors)
            except UnicodeDecodeError as error:
                raise CorpusError(
                    f"{path}: at byte {error.start}: expected UTF-8 text, found "
                    f"0x{error.object[error.start]:02x}; convert the file to UTF-8, or leave it "
                    "out (globs such as 'folder/**/*.txt' choose files)"
                ) from error

    def measure() -> np.ndarray:
        return np.array([path.stat().st_size for path in paths], dtype=np.int64)

    return Corpus(source, measure, documents)


def _expand(given: str | os.PathLike) -> list[Path]:
    """Return the files that match one PATH of the command line, sorted."""
    if not os.fspath(given):  # Path("") is the current folder
        raise CorpusError(
            "expected a file, a folder or a glob, found an empty path; check that the variables of "
            "the command are set"
        )
    path = Path(given)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = (found for found in path.rglob("*") if found.is_file())
        files = sorted(
            f for f in inside if not any(part.startswith(".") for part in f.relative_to(path).parts)
        )
    else:
        files = sorted(
            Path(name)
            for name in glob.glob(os.fspath(given), recursive=True)
            if os.path.isfile(name)
        )
    if not files:
        raise CorpusError(
            f"{given}: expected a file, a folder of files or a glob that matches some, found "
            "nothing"
        )
    return files


def _lines(files: list[Path]) -> Iterator[tuple[Path, int, bytes]]:
    """Yield file, line number from 1 and bytes of every line that is not blank."""
    for path in files:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line := line.strip():
                    yield path, number, line


def _field_of(line: bytes, field: str, where: str, option: str) -> str:
    try:
        row = json.loads(line)
    # JSONDecodeError, UnicodeDecodeError, and deeply nested lists
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"{where}: expected a JSON object, found {line[:60]!r} ({error}); {_BAD_LINE_ADVICE}"
        ) from error
    if not isinstance(row, dict):
        found = f"{line[:60]!r}"
    elif field not in row:
        found = f"the fields {', '.join(map(repr, row))[:200]}"
    elif not isinstance(row[field], str):
        found = f"{type(row[field]).__name__} in it"
    else:
        return row[field]
    raise CorpusError(
        f"{where}: expected an object with text in the field {field!r}, found {found}; name "
        f"another with {option} NAME, or {_BAD_LINE_ADVICE}"
    )
