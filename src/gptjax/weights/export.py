"""Export of a model to the formats of other programs."""

import contextlib
import functools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, cast

from gptjax.models.base import Model
from gptjax.models.gpt2 import GPT2
from gptjax.weights.bpe_files import save_tokenizer
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import reason, shown
from gptjax.weights.gguf_file import save_gguf
from gptjax.weights.hf import save_hf
from gptjax.weights.llmc import save_llmc

Format = Literal["hf", "llmc", "gguf"]

SUFFIXES: dict[Format, str] = {"llmc": ".bin", "gguf": ".gguf"}

# Names of the architectures' config classes by format.
ARCHITECTURES: dict[Format, tuple[str, ...]] = {
    "hf": ("GPT2Config", "Llama3Config"),
    "llmc": ("GPT2Config",),
    "gguf": ("GPT2Config", "Llama3Config"),
}


def check_architecture(architecture: str, to: Format) -> None:
    """Raise WeightsError if an architecture cannot be exported to a format."""
    if architecture not in (known := ARCHITECTURES[to]):
        formats = [name for name, others in ARCHITECTURES.items() if architecture in others]
        raise WeightsError(
            f"{to} files: expected one of the architectures {', '.join(known)}, found "
            f"{architecture}, which can be exported to {', '.join(formats) or 'no format'}"
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
    path = Path(path)
    check_architecture(type(model.config).__name__, to)
    check_new(path)
    check_suffix(path, to)
    with created(path) as temporary:
        if to == "gguf":
            save_gguf(model, temporary, tokenizer=tokenizer, name=path.stem)
        elif to == "llmc":
            save_llmc(cast(GPT2, model), temporary)
        else:
            save_hf(model, temporary)
            if tokenizer is not None:
                save_tokenizer(tokenizer, temporary, model.config.block_size)
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
