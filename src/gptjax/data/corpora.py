"""Sources of documents: Python's standard library, Tiny Shakespeare, text files, JSON lines,
parquet files, and rows of the package `datasets`.

A `Corpus` measures all documents before it yields the first, so that the split into training and
validation is known at the start, or it reads a stream once. It yields the texts one by one, so that
a corpus need not fit in memory.
"""

import dataclasses
import functools
import glob
import hashlib
import itertools
import json
import os
import platform
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gptjax.data.shards import DataError

TINYSHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
_TINYSHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"

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
            one size above 0. The size of an empty document is 0. None for a stream that is read
            once: of 1/val_fraction consecutive documents, one is drawn for validation.
        documents: returns a new iterator over the documents that `measure` counts: texts or, with
            `masked`, pairs.
        masked: whether the documents are pairs.
    """

    source: str
    measure: Callable[[], np.ndarray] | None
    documents: Callable[[], Iterator[Document]]
    masked: bool = False


def stdlib() -> Corpus:
    """Return the sources of the running Python's standard library, one document for each file."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [x for x in folders if x not in _STDLIB_EXCLUDED and x[:7] != "config-"]
        sources = [name for name in names if name.endswith(".py")]
        paths += [Path(folder, name) for name in sources if not name.startswith("_sysconfigdata")]
    paths = [path for path in paths if path.stat().st_size]
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
    )


def _download_tinyshakespeare() -> bytes:
    try:
        with urllib.request.urlopen(TINYSHAKESPEARE_URL, timeout=20) as response:
            content = response.read()
        if (found := hashlib.sha256(content).hexdigest()) != _TINYSHAKESPEARE_SHA256:
            raise OSError(f"expected SHA-256 {_TINYSHAKESPEARE_SHA256}, found {found}")
        return content
    except OSError as error:  # URLError, timeouts and broken connections are OSErrors
        raise CorpusError(
            f"could not download {TINYSHAKESPEARE_URL} ({error}); fetch it on a machine with a "
            "network and pass `--file PATH`, or use the corpus that needs no network: `python -m "
            "gptjax.data stdlib`"
        ) from error


def text(paths: Sequence[str | os.PathLike]) -> Corpus:
    """Return UTF-8 text files as a corpus, one document for each file. Empty files are skipped.

    Args:
        paths: files, folders (all files at any depth except hidden files) and globs, including
            `**`.
    """
    files = [path for path in _expand(paths) if path.stat().st_size]
    shown = " ".join(map(os.fspath, paths))
    if not files:
        raise CorpusError(f"{shown}: expected files with text, found nothing but empty files")
    return _files(f"text: {shown}", files)


def jsonl(
    paths: Sequence[str | os.PathLike],
    field: str = "text",
    *,
    prompt_field: str | None = None,
    answer_field: str | None = None,
    separator: str = "\n",
) -> Corpus:
    """Return JSON lines as a corpus, one document or pair for each line. Blank lines are skipped.

    `measure` raises CorpusError at the first bad line, before tokenizing.

    Args:
        paths: files, folders and globs, see `text`.
        field: field of each line's object that holds the text.
        prompt_field, answer_field: fields that hold the two texts of a pair, in place of `field`.
            An empty answer is an error.
        separator: end of each prompt.
    """
    if (prompt_field is None) != (answer_field is None):
        raise CorpusError("expected a prompt field and an answer field together, found one")
    masked, files, shown = prompt_field is not None, _expand(paths), " ".join(map(os.fspath, paths))
    fields = f"field {field!r}"
    if masked:
        fields = f"prompts {prompt_field!r}, answers {answer_field!r}, separator {separator!r}"

    def read(line: bytes, where: str) -> Document:
        try:
            row = json.loads(line)
        # JSONDecodeError, UnicodeDecodeError, and deeply nested lists
        except (ValueError, RecursionError) as error:
            raise CorpusError(
                f"{where}: expected a JSON object, found {line[:60]!r} ({error})"
            ) from error
        if prompt_field is None or answer_field is None:
            return _text_in(row, field, where, "--field")
        prompt = _text_in(row, prompt_field, where, "--prompt-field")
        if answer := _text_in(row, answer_field, where, "--answer-field"):
            return Pair(prompt + separator, answer)
        raise CorpusError(f"{where}: expected a text in {answer_field!r}, found an empty one")

    def rows() -> Iterator[tuple[int, Document]]:
        for path in files:
            with path.open("rb") as file:
                for number, line in enumerate(map(bytes.strip, file), start=1):
                    if line:
                        document = read(line, f"{path}, line {number}")
                        # An empty text has no tokens: no text for the validation split.
                        yield len(line) if document else 0, document

    def measure() -> np.ndarray:
        sizes = np.fromiter((size for size, _ in rows()), np.int64)
        if not sizes.any():
            raise CorpusError(f"{shown}: expected lines of JSON with texts in {fields}, found none")
        return sizes

    source = f"jsonl: {shown} ({fields})"
    return Corpus(source, measure, lambda: (document for _, document in rows()), masked)


def parquet(paths: Sequence[str | os.PathLike], field: str = "text") -> Corpus:
    """Return a column of parquet files as a stream, one document for each row.

    Args:
        paths: files, folders and globs, see `text`.
        field: name of the column.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise CorpusError(
            "parquet files need pyarrow, found none; pip install 'gptjax[parquet]'"
        ) from error
    files = _expand(paths)

    def documents() -> Iterator[str]:
        for path in files:
            try:
                with pyarrow.parquet.ParquetFile(path) as file:
                    names = file.schema_arrow.names
                    columns = [field] if field in names else names  # all for the message
                    batches = file.iter_batches(batch_size=1024, columns=columns)
                    rows = (row for batch in batches for row in batch.to_pylist())
                    yield from _texts(rows, field, str(path))
            except (pyarrow.ArrowException, OSError) as error:
                raise CorpusError(f"{path}: {error}") from error

    shown = " ".join(map(os.fspath, paths))
    return Corpus(f"parquet: {shown} (field {field!r})", None, documents)


def rows(
    rows: Iterable[Mapping[str, Any]], field: str = "text", *, source: str, count: int | None = None
) -> Corpus:
    """Return rows as a stream, such as a Dataset or an IterableDataset of the package `datasets`.

    Args:
        rows: objects with a text in `field`.
        source: description of the origin.
        count: number of rows to read; None for all rows.
    """
    source = f"{source} (field {field!r}{'' if count is None else f', {count} rows'})"
    return Corpus(source, None, lambda: _texts(itertools.islice(rows, count), field, source))


def hub(
    name: str,
    field: str = "text",
    *,
    subset: str | None = None,
    split: str = "train",
    count: int | None = None,
) -> Corpus:
    """Return a dataset of the Hugging Face Hub, or of a local folder, as a stream of documents.

    Args:
        name, subset, split: arguments of `datasets.load_dataset`.
        field, count: see `rows`.
    """
    source = f"datasets: {' '.join(filter(None, (name, subset, split)))}"
    try:
        import datasets
    except ImportError as error:
        raise CorpusError(
            f"{source}: needs the package datasets, found none; pip install 'gptjax[datasets]'"
        ) from error
    try:
        found = datasets.load_dataset(name, subset, split=split, streaming=True)
    # The hub, the HTTP client and the readers raise errors without a common base class.
    except Exception as error:
        raise CorpusError(f"{source}: {type(error).__name__}: {str(error)[:300]}") from error
    return rows(found, field, source=source, count=count)


def of_files(paths: Sequence[str | os.PathLike], field: str = "text") -> Corpus:
    """Return the corpus of text files, or of .jsonl or .parquet files with texts in `field`."""
    suffixes = {path.suffix for path in _expand(paths)}
    if suffixes == {".jsonl"}:
        return jsonl(paths, field)
    return parquet(paths, field) if suffixes == {".parquet"} else text(paths)


def _texts(rows: Iterable[Mapping[str, Any]], field: str, where: str) -> Iterator[str]:
    for number, row in enumerate(rows, start=1):
        yield _text_in(row, field, f"{where}, row {number}", "--field")


def _text_in(row: Any, field: str, where: str, option: str) -> str:
    """Return the text in a field of a row. Raise CorpusError, with the option, if there is none."""
    if not isinstance(row, Mapping):
        found = type(row).__name__
    elif isinstance(text := row.get(field), str):
        return text
    else:
        found = f"{type(text).__name__}; the fields are {', '.join(row)}"
    raise CorpusError(
        f"{where}: expected a text in the field {field!r} (option {option}), found {found}"
    )


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


def _expand(paths: Sequence[str | os.PathLike]) -> list[Path]:
    """Return the files that match the PATHs of the command line, each once, sorted for a PATH."""
    files: dict[Path, None] = {}  # a set that keeps its order
    for given in paths or [""]:
        path = Path(given)
        if path.is_dir() and os.fspath(given):  # Path("") is the current folder
            inside = {f: f.relative_to(path).parts for f in path.rglob("*") if f.is_file()}
            found = [f for f, parts in inside.items() if not any(x[0] == "." for x in parts)]
        else:
            matches = [path, *map(Path, glob.glob(os.fspath(given), recursive=True))]
            found = [f for f in matches if f.is_file()]
        if not found:
            raise CorpusError(
                f"{os.fspath(given)!r}: expected a file, a folder of files or a glob that matches "
                "some, found nothing"
            )
        files.update(dict.fromkeys(sorted(found)))
    return list(files)
