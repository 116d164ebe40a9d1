"""Write train.py and a config into a folder: `gptjax init FOLDER`."""

import functools
import re
import shlex
import sys
from pathlib import Path
from typing import Annotated

import tyro

from gptjax.scripts import FOLDER, config_names
from gptjax.terminal import exit_code, hint


def init(
    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")],
    config: str = "gpt2_tiny",
) -> None:
    """Write train.py and a config, to be changed, into a folder.

    Args:
        folder: Folder, created if it does not exist. Existing files are not overwritten.
        config: Name of the config of gptjax to copy, with the configs that it imports.

    Raises:
        ValueError: gptjax has no such config.
        OSError: a file exists, or cannot be written.
    """
    if config not in (known := config_names()):
        raise ValueError(f"--config must be one of {', '.join(known)}, got {config!r}")
    texts, todo = {}, ["train.py", f"configs/{config}.py"]
    while todo:
        file = todo.pop()
        texts[file] = text = (FOLDER / file).read_text(encoding="utf-8")
        modules = re.findall(r"^from (\w+) import", text, re.M)
        todo += [f"configs/{name}.py" for name in modules if name in known]
    for file in sorted(texts):
        if (folder / file).exists():
            raise FileExistsError(f"{folder / file} exists, and is not overwritten")
    for file, text in sorted(texts.items()):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        with (folder / file).open("x", encoding="utf-8") as out:
            out.write(text)
        print(folder / file)
    hint(f"cd {shlex.quote(str(folder))} && python train.py --config configs/{config}.py")


if __name__ == "__main__":
    command = functools.partial(tyro.cli, init, prog="gptjax init")
    sys.exit(exit_code(command, (ValueError,)))
