"""Export of a model to the formats of other programs, with one table of architectures per
format."""

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from gptjax.models.base import Model
from gptjax.weights import gguf_file
from gptjax.weights.bpe_files import save_tokenizer
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import reason, shown
from gptjax.weights.hf import save_hf
from gptjax.weights.llama import save_llama
from gptjax.weights.llmc import save_llmc

Format = Literal["hf", "llmc", "gguf"]

SUFFIXES: dict[Format, str] = {"llmc": ".bin", "gguf": ".gguf"}

Writer = Callable[[Model, Path, str | None, str], None]
"""Function of a model, a new path, a tokenizer's name or None, and the model's name."""


def _hf_gpt2(model, path: Path, tokenizer: str | None, name: str) -> None:
    save_hf(model, path)
    if tokenizer is not None:
        save_tokenizer(tokenizer, path, model.config.block_size)


def _hf_llama3(model, path: Path, tokenizer: str | None, name: str) -> None:
    save_llama(model, path)
    if tokenizer is not None:
        save_tokenizer(tokenizer, path, model.config.block_size)


def _llmc_gpt2(model, path: Path, tokenizer: str | None, name: str) -> None:
    save_llmc(model, path)


def _gguf(architecture: gguf_file.Architecture) -> Writer:
    def write(model: Model, path: Path, tokenizer: str | None, name: str) -> None:
        gguf_file.save_gguf(model, path, architecture=architecture, tokenizer=tokenizer, name=name)

    return write


# Writers by format and by the name of the architecture's config class.
WRITERS: dict[Format, dict[str, Writer]] = {
    "hf": {"GPT2Config": _hf_gpt2, "Llama3Config": _hf_llama3},
    "llmc": {"GPT2Config": _llmc_gpt2},
    "gguf": {"GPT2Config": _gguf(gguf_file.GPT2), "Llama3Config": _gguf(gguf_file.LLAMA)},
}


def check_architecture(architecture: str, to: Format) -> None:
    """Raise WeightsError if an architecture cannot be exported to a format."""
    known = WRITERS[to]
    if architecture not in known:
        formats = [name for name, writers in WRITERS.items() if architecture in writers]
        others = f"to {', '.join(formats)}" if formats else "to no format"
        raise WeightsError(
            f"{to} files: expected one of the architectures {', '.join(known)}, found "
            f"{architecture}, which can be exported {others}"
        )


def check_suffix(path: Path, to: Format) -> None:
    """Raise WeightsError if a file's name lacks the suffix by which programs detect its format."""
    suffix = SUFFIXES.get(to, path.suffix)
    if path.suffix != suffix:
        raise WeightsError(
            f"{shown(path)}: expected a name that ends in {suffix} for the format {to}, such as "
            f"{shown(path.with_suffix(suffix))}"
        )


def export(model: Model, path: str | os.PathLike, to: Format, *, tokenizer: str | None) -> str:
    """Write a model in another program's format, and return a sentence about its tokenizer.

    The path appears when all files are complete and on disk.

    Args:
        path: a folder for hf, else a file: .bin for llmc, .gguf for gguf. The path must not exist;
            its parent folder must.
        to: "hf", "llmc" or "gguf".
        tokenizer: "gpt2", "byte" or None. hf folders store both tokenizers, GGUF files store gpt2
            only, and llm.c's files store no tokenizer.

    Raises:
        WeightsError: no export of this architecture, the path exists or lacks the suffix, or
            writing fails.
        TokenizerUnavailable: the files of GPT-2's tokenizer are neither cached nor downloadable.
    """
    path, architecture = Path(path), type(model.config).__name__
    check_architecture(architecture, to)
    check_new(path)
    check_suffix(path, to)
    with created(path) as temporary:
        WRITERS[to][architecture](model, temporary, tokenizer, path.stem)
    return _about_tokenizer(to, tokenizer)


def _about_tokenizer(to: Format, tokenizer: str | None) -> str:
    if tokenizer is None:
        return "only the model: its tokenizer is not known"
    if to == "llmc":
        return "only the model: llm.c's model files have no tokenizer"
    if to == "gguf" and tokenizer != "gpt2":
        return f"only the model: GGUF has no tokenizer like {tokenizer}"
    return f"with the tokenizer {tokenizer}"


def check_new(path: Path) -> None:
    """Raise WeightsError if a path exists, or if its parent does not."""
    if path.exists() or path.is_symlink():
        raise WeightsError(f"{shown(path)}: expected a new path, found an existing one")
    if not path.absolute().parent.is_dir():
        raise WeightsError(f"{shown(path)}: the folder {shown(path.parent)} does not exist")


@contextlib.contextmanager
def created(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; at the end, call fsync and rename it to
    `path`.

    After an error, nothing is left.

    Raises:
        WeightsError: writing fails, for example because the disk is full.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        for file in (*temporary.rglob("*"), temporary) if temporary.is_dir() else (temporary,):
            _synchronize(file)
        check_new(path)
        os.rename(temporary, path)
        _synchronize(path.absolute().parent)
    except OSError as error:
        raise WeightsError(f"{shown(path)}: not written: {reason(error)}") from error
    finally:
        remove = shutil.rmtree if temporary.is_dir() else functools.partial(Path.unlink)
        with contextlib.suppress(OSError):
            remove(temporary)


def _synchronize(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
