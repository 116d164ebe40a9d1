"""Export a trained model to other programs: `python -m gptjax.export RUN --to hf --out FOLDER`."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.data import DataError
from gptjax.data.tokenizers import TokenizerChoice
from gptjax.terminal import command_line, exit_code, interrupt, printable
from gptjax.training.checkpoint import silence_orbax
from gptjax.weights import WeightsError, load, sources
from gptjax.weights.export import Format, check_architecture, check_new, check_suffix, export


def main(
    path: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="PATH")],
    to: Format,
    out: Path,
    step: int | None = None,
    tokenizer: TokenizerChoice = "auto",
) -> int:
    """Export a model to Hugging Face's transformers, llm.c or llama.cpp.

    Args:
        path: Run's folder, the folder of a checkpoint, a Hugging Face folder or an llm.c file.
        to: hf: a folder with config, safetensors and tokenizer; llmc: .bin; gguf: [gguf] installed.
        out: Folder or file to create.
        step: Step of a run's checkpoint. None: the newest.
        tokenizer: auto: the tokenizer of the run's data, or gpt2 for a vocabulary of 50,257.
    """

    def command() -> None:
        check_new(out)
        check_suffix(out, to)
        source = sources.find(path, step=step)
        check_architecture(source.architecture, to)
        model, found = load(source.path, tokenizer=tokenizer)
        note = export(model, out, to, tokenizer=None if found is None else found.name)
        print(printable(f"{out}: {source.architecture.removesuffix('Config')} of {source}, {note}"))

    def interrupted() -> str:
        return "interrupted" if out.exists() else f"interrupted; {out} is not written"

    return exit_code(command, (WeightsError, DataError, OSError), interrupted)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    silence_orbax()
    sys.exit(command_line(main, prog="python -m gptjax.export"))
