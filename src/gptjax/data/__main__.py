"""Prepare token shards: `python -m gptjax.data`."""

import dataclasses
import shlex
import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.data import corpora
from gptjax.data.corpora import Corpus
from gptjax.data.dataset import check_dataset
from gptjax.data.fineweb import prepare_fineweb
from gptjax.data.manifest import DatasetError, read_manifest
from gptjax.data.prepare import Options, prepare_corpus
from gptjax.data.tokenizers import model_options, train_bpe
from gptjax.terminal import exit_code, hint, interrupt, print_line
from gptjax.user_folders import data_folder

type _Paths = tyro.conf.Positional[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATH...")]]


def _prepare(kind: str, corpus: Corpus, options: Options) -> None:
    """Prepare the corpus, and print the command that trains a small model on it."""
    folder = prepare_corpus(kind, corpus, options)
    manifest, model = read_manifest(folder), []
    if manifest and manifest.tokenizer != "byte":  # the config's
        model = model_options(manifest.vocab_size).split()
    _suggest("gpt2_tiny", folder.name, options.data_dir, *model)


def _suggest(config: str, dataset: str, data_dir: Path | str, *options: str) -> None:
    """Print the command that trains with a config on a dataset."""
    place = [] if data_dir == data_folder() else ["--data-dir", str(data_dir)]
    run = ["--config", config, "--name", dataset, "--dataset", dataset, *place, *options]
    hint(shlex.join(["gptjax", "train", *run]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stdlib(Options):
    """Sources of the running Python's standard library: 10 MB on every machine, no download."""

    def run(self) -> None:
        _prepare("stdlib", corpora.stdlib(), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyShakespeare(Options):
    """Shakespeare's plays, 1.1 MB, downloaded or from --file."""

    file: Path | None = None
    """File with the text. None: download from karpathy/char-rnn on GitHub."""

    def run(self) -> None:
        _prepare("tinyshakespeare", corpora.tinyshakespeare(self.file), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text(Options):
    """UTF-8 text files, one document for each file."""

    paths: _Paths
    """Files, folders (all files in them, at any depth) and globs such as 'books/**/*.txt'."""

    def run(self) -> None:
        _prepare("text", corpora.text(self.paths), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Jsonl(Options):
    """JSON lines, one document for each line, or one pair of prompt and answer."""

    paths: _Paths
    """Files, folders (all files in them, at any depth) and globs such as 'dumps/*.jsonl'."""
    field: str = "text"
    """Field that holds the text."""
    prompt_field: str | None = None
    """Field that holds the prompt; needs answer-field and replaces field. Prompts have no loss."""
    answer_field: str | None = None
    """Field that holds the answer."""
    separator: str = "\n"
    """End of each prompt, before the answer. A newline by default."""

    def run(self) -> None:
        own = ("field", "prompt_field", "answer_field", "separator")
        corpus = corpora.jsonl(self.paths, **{name: getattr(self, name) for name in own})
        _prepare("jsonl", corpus, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parquet(Options):
    """Parquet files, one document for each row; needs the extra [parquet]."""

    paths: _Paths
    """Files, folders (all files in them, at any depth) and globs such as 'dumps/*.parquet'."""
    field: str = "text"
    """Column that holds the text."""

    def run(self) -> None:
        _prepare("parquet", corpora.parquet(self.paths, self.field), self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Datasets(Options):
    """A dataset of the Hugging Face Hub, read once as a stream; needs the extra [datasets]."""

    dataset: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="DATASET")]]
    """Name on the Hub, or a local folder."""
    subset: str | None = None
    """Subset (configuration) of the dataset."""
    split: str = "train"
    """Split of the dataset."""
    field: str = "text"
    """Field that holds the text."""
    rows: int | None = None
    """Number of rows to read. None: all rows."""

    def run(self) -> None:
        how = {"subset": self.subset, "split": self.split, "count": self.rows}
        corpus = corpora.hub(self.dataset, self.field, **how)
        _prepare(Path(self.dataset).name, corpus, self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainTokenizer:
    """Train a byte-level BPE and write a tokenizer.json; needs the extra [tokenizers]."""

    paths: _Paths
    """Text files, or .jsonl or .parquet files with texts in field."""
    vocab_size: int = 32_768
    """Number of ids, including 256 bytes and the end-of-text token."""
    out: Path = Path("tokenizer.json")
    """File to create, whose name ends in .json."""
    field: str = "text"
    """Field or column that holds the text."""

    def run(self) -> None:
        corpus = corpora.of_files(self.paths, self.field)
        tokenizer = train_bpe(corpus.documents(), self.vocab_size, self.out)
        print_line(f"{self.out}: {tokenizer.vocab_size:,} ids, name {tokenizer.name}")
        kind = corpus.source.partition(":")[0]
        hint(shlex.join(["gptjax", "data", kind, *self.paths, "--tokenizer", str(self.out)]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineWeb:
    """FineWeb 10B, tokenized with GPT-2's BPE: download of shards of 100 M tokens (200 MB)."""

    data_dir: Path = dataclasses.field(default_factory=data_folder)
    """Folder of the datasets, created if it does not exist."""
    name: str = "fineweb10B"
    """The dataset's folder in data-dir."""
    shards: int = 10
    """Number of training shards, 1 to 103 (21 GB). Existing complete shards are not downloaded
    again."""

    def run(self) -> None:
        prepare_fineweb(self.data_dir, shards=self.shards, name=self.name)
        _suggest("gpt2_124m", self.name, self.data_dir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """Compare every shard of a dataset with dataset.json. Exit code 1 if a shard is damaged."""

    folder: tyro.conf.Positional[Path]
    """The dataset's folder, such as data/fineweb10B."""

    def run(self) -> None:
        if problems := check_dataset(self.folder):
            raise DatasetError(
                f"{self.folder}: {len(problems)} damaged files:\n  " + "\n  ".join(problems)
            )
        print_line(f"{self.folder}: all files are intact")


type _Command = (
    Annotated[Stdlib, tyro.conf.subcommand("stdlib")]
    | Annotated[TinyShakespeare, tyro.conf.subcommand("tinyshakespeare")]
    | Annotated[Text, tyro.conf.subcommand("text")]
    | Annotated[Jsonl, tyro.conf.subcommand("jsonl")]
    | Annotated[Parquet, tyro.conf.subcommand("parquet")]
    | Annotated[Datasets, tyro.conf.subcommand("datasets")]
    | Annotated[FineWeb, tyro.conf.subcommand("fineweb10B")]
    | Annotated[TrainTokenizer, tyro.conf.subcommand("train-tokenizer")]
    | Annotated[Check, tyro.conf.subcommand("check")]
)


def main(args: list[str] | None = None) -> int:
    """Run the command line and return the exit code."""

    def prepare() -> None:
        command = tyro.cli(
            _Command,
            prog="gptjax data",
            description="Prepare a text as token shards in llm.c's .bin format, or train a "
            "tokenizer.\n"
            "Datasets are created atomically: an interrupted command can be repeated.",
            args=args,
        )
        command.run()

    return exit_code(prepare, interrupted="interrupted; no partial dataset is left")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    sys.exit(main())
