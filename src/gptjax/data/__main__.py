"""python -m gptjax.data: prepare token shards."""

import dataclasses
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.data import corpora
from gptjax.data.atomic import PrepareError
from gptjax.data.check import check_dataset
from gptjax.data.errors import DataError
from gptjax.data.fineweb import prepare_fineweb
from gptjax.data.manifest import DatasetError
from gptjax.data.prepare import Options, prepare_corpus
from gptjax.data.tokenizers import TokenizerChoice
from gptjax.terminal import printable

_PATHS = tyro.conf.arg(metavar="PATH...", help_behavior_hint="(at least one)")
type _Paths = tyro.conf.Positional[Annotated[tuple[str, ...], _PATHS]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Common:
    data_dir: Path = Path("data")
    """Folder that datasets lie in; made if it is not there."""
    name: str | None = None
    """The dataset's folder under data-dir. None: the corpus and the tokenizer, such as
    stdlib_byte."""
    tokenizer: TokenizerChoice = "auto"
    """gpt2 (BPE) needs a network or TIKTOKEN_CACHE_DIR; byte needs nothing; auto: gpt2 if possible,
    else byte, said."""
    val_fraction: float = 0.05
    """Part of the text that becomes the validation split: whole documents; of a single document,
    its end."""
    shard_tokens: int = 100_000_000
    """Tokens in a shard. The last shard of a split holds half to one and a half times as many."""
    workers: int | None = None
    """Tokenising threads. None: one for each CPU core."""
    seed: int = 0
    """Chooses which documents are for validation."""
    overwrite: bool = False
    """Make the dataset again if it is there already."""

    def options(self) -> Options:
        return Options(
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(Options)}
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stdlib(_Common):
    """The running Python's own standard-library sources: 10 MB of real text on every machine, no
    download."""

    def run(self) -> None:
        prepare_corpus("stdlib", corpora.stdlib(), self.options())


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyShakespeare(_Common):
    """Shakespeare's plays, 1.1 MB, downloaded or from --file."""

    file: Path | None = None
    """The text, if it is here already. None: download it from karpathy/char-rnn on GitHub."""

    def run(self) -> None:
        prepare_corpus("tinyshakespeare", corpora.tinyshakespeare(self.file), self.options())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(_Common):
    """Your own text files, UTF-8, a file a document."""

    paths: _Paths
    """Files, folders (all files in them, at any depth) and globs such as 'books/**/*.txt'."""

    def run(self) -> None:
        prepare_corpus("text", corpora.text(_some(self.paths)), self.options())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(_Common):
    """Your own JSON lines, a line a document."""

    paths: _Paths
    """Files, folders (all files in them, at any depth) and globs such as 'dumps/*.jsonl'."""
    field: str = "text"
    """The field of each line's object that holds the text."""
    skip_bad_lines: bool = False
    """Leave out lines that are no JSON object with a text in that field; their number and the first
    are printed."""

    def run(self) -> None:
        corpus = corpora.jsonl(_some(self.paths), self.field, skip_bad_lines=self.skip_bad_lines)
        prepare_corpus("jsonl", corpus, self.options())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWeb:
    """FineWeb 10B, already tokenised with GPT-2's BPE: downloaded in shards of 100 M tokens (200
    MB)."""

    data_dir: Path = Path("data")
    """Folder that datasets lie in; made if it is not there."""
    name: str = "fineweb10B"
    """The dataset's folder under data-dir."""
    shards: int = 10
    """Training shards to have, 1 to 103 (all of them are 20 GB). Whole ones that are there are not
    fetched again."""

    def run(self) -> None:
        prepare_fineweb(self.data_dir, shards=self.shards, name=self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Read every shard of a prepared dataset and compare it with dataset.json. Exit code 1 if one
    is damaged."""

    folder: tyro.conf.Positional[Path]
    """The dataset's folder, such as data/fineweb10B."""

    def run(self) -> None:
        if problems := check_dataset(self.folder):
            raise DatasetError(
                f"{self.folder}: {len(problems)} damaged shards:\n  " + "\n  ".join(problems)
            )
        print(f"{printable(str(self.folder))}: all shards are intact")


type _Command = (
    Annotated[Stdlib, tyro.conf.subcommand("stdlib")]
    | Annotated[TinyShakespeare, tyro.conf.subcommand("tinyshakespeare")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Jsonl, tyro.conf.subcommand("jsonl")]
    | Annotated[FineWeb, tyro.conf.subcommand("fineweb10B")]
    | Annotated[Check, tyro.conf.subcommand("check")]
)


def _some(paths: tuple[str, ...]) -> tuple[str, ...]:
    if not paths:
        raise PrepareError("expected at least one PATH (a file, a folder or a glob), found none")
    return paths


def main(args: list[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        try:
            command = tyro.cli(
                _Command,
                prog="python -m gptjax.data",
                description="Prepare a text as token shards in llm.c's .bin format. "
                "A dataset is complete or not there: interrupt and repeat as you like.",
                args=args,
            )
            command.run()
        finally:
            sys.stdout.flush()
    # the reader, such as `head`, has ended; also without a second error at the exit's flush
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (DataError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print("interrupted; nothing half-made is left", file=sys.stderr)
        return 128 + (interrupt.args[0] if interrupt.args else signal.SIGINT)
    return 0


def _terminate(number: int, _: object) -> None:
    """End as Ctrl-C does, which removes what is half-made."""
    raise KeyboardInterrupt(number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminate)
    sys.exit(main())
