"""Export a trained model to other programs: `python -m gptjax.export RUN --to hf --out FOLDER`."""

import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from gptjax.data.tokenizers import AnyTokenizer
from gptjax.models.base import Model
from gptjax.models.gpt2 import GPT2
from gptjax.terminal import exit_code, hint, interrupt, print_line
from gptjax.training.checkpoint import silence_orbax
from gptjax.weights import WeightsError, load, save_hf, save_llmc, sources
from gptjax.weights.bpe_files import save_tokenizer
from gptjax.weights.gguf_file import check_gguf, save_gguf

Format = Literal["hf", "llmc", "gguf"]
Dtype = Literal["fp32", "bf16"]

# Suffixes by which programs detect the format of a file.
SUFFIXES: dict[Format, str] = {"llmc": ".bin", "gguf": ".gguf"}


def export(
    model: Model,
    path: str | os.PathLike,
    to: Format,
    *,
    tokenizer: AnyTokenizer | None,
    dtype: Dtype = "fp32",
) -> str:
    """Write a model in another program's format, and return a sentence about its tokenizer.

    After an error, nothing is left.

    Args:
        path: a folder for hf, else a file: .bin for llmc, .gguf for gguf. The path must not exist;
            its parent folder must.
        to: "hf", "llmc" or "gguf".
        tokenizer: hf folders store any tokenizer, GGUF files store byte-level BPE of GPT-2's or
            Llama 3's kind, and llm.c's files store no tokenizer.
        dtype: type of the tensors.

    Raises:
        WeightsError: no export of this architecture, the path exists or lacks the suffix, or
            writing fails.
    """
    path, stored = Path(path), to == "hf"
    check_path(path, to)
    try:
        if to == "gguf":
            how = {"tokenizer": tokenizer, "name": path.stem, "dtype": dtype}
            stored = save_gguf(model, path, **how)
        elif to == "llmc":
            save_llmc(cast(GPT2, model), path, dtype=dtype)
        else:
            save_hf(model, path, dtype=dtype)
            if tokenizer is not None:
                save_tokenizer(tokenizer, path, model.config.block_size)
    except BaseException:  # also Ctrl-C
        shutil.rmtree(path, ignore_errors=True)
        raise
    if tokenizer is None:
        return "only the model: its tokenizer is not known"
    if stored:
        return f"with the tokenizer {tokenizer.name}"
    return f"only the model: a {path.suffix} file does not store the tokenizer {tokenizer.name}"


def check_path(path: Path, to: Format) -> None:
    """Raise WeightsError if a path exists, has no parent folder, or lacks the format's suffix."""
    if path.exists() or path.is_symlink():
        raise WeightsError(f"{path}: expected a new path, found an existing one")
    if not path.absolute().parent.is_dir():
        raise WeightsError(f"{path}: the folder {path.parent} does not exist")
    suffix = SUFFIXES.get(to, path.suffix)
    if path.suffix != suffix:
        raise WeightsError(f"{path}: expected a name that ends in {suffix} for the format {to}")


def main(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")],
    to: Format,
    out: Path,
    step: int | None = None,
    tokenizer: str = "auto",
    dtype: Dtype = "fp32",
) -> int:
    """Export a model to Hugging Face's transformers, llm.c or llama.cpp.

    Args:
        path: Run's folder, the folder of a checkpoint, a Hugging Face folder or an llm.c file.
        to: hf: a folder with config, safetensors and tokenizer; llmc: .bin; gguf: [gguf] installed.
        out: Folder or file to create.
        step: Step of a run's checkpoint. None: the newest.
        tokenizer: auto: the model's tokenizer. gpt2, byte, or the path of a tokenizer.json.
        dtype: Type of the tensors. bf16 has half the size, rounded to nearest.
    """

    def command() -> None:
        check_path(out, to)
        if to == "gguf":
            check_gguf()
        source = sources.find(path, step=step)
        model, found = load(source.path, tokenizer=tokenizer)
        note = export(model, out, to, tokenizer=found, dtype=dtype)
        print_line(f"{out}: {source.architecture.removesuffix('Config')} of {source}, {note}")
        program = "llama-cli -m" if to == "gguf" else "gptjax sample"
        if to != "gguf" or note.startswith("with"):  # llama.cpp needs the tokenizer
            hint(f"{program} {shlex.quote(str(out))}")

    return exit_code(command)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    silence_orbax()
    sys.exit(tyro.cli(main, prog="gptjax export"))
