"""The command `gptjax`: `gptjax sample` runs the module gptjax.sample as `python -m` does."""

import difflib
import runpy
import sys

import gptjax

COMMANDS = {
    "train": "train a model: gptjax train --config gpt2_tiny",
    "init": "write train.py and a config into a folder, to be changed",
    "data": "prepare text for training",
    "sample": "continue prompts with a model",
    "evaluate": "score a model",
    "export": "write a model for transformers, llm.c or llama.cpp",
    "plot": "draw the loss curves of runs",
    "plan": "predict the memory, time and cost of a run",
    "bench": "measure kernels and training steps",
    "doctor": "check the installation, the GPUs and the kernels",
}


def main() -> None:
    """Run a command. Only the command's own modules are imported."""
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        lines = [f"  {command:<10}{text}" for command, text in COMMANDS.items()]
        print("usage: gptjax COMMAND [OPTION ...]\n", *lines, sep="\n")
        print("\ngptjax COMMAND --help lists the options; gptjax --version prints the version.")
    elif name == "--version":
        print(f"gptjax {gptjax.__version__}")
    elif name in COMMANDS:
        sys.argv[1:] = rest
        runpy.run_module(f"gptjax.{name}", run_name="__main__", alter_sys=True)
    else:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        guess = f"; did you mean {near[0]}?" if near else "; gptjax --help lists the commands"
        print(f"error: gptjax has no command {name!r}{guess}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
