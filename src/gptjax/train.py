"""The command `gptjax train`: the script train.py. Import `gptjax.training` instead."""

import sys

from gptjax.scripts import FOLDER

if __name__ == "__main__":
    sys.argv[0] = "gptjax train"
    path = str(FOLDER / "train.py")
    with open(path, encoding="utf-8") as file:
        exec(compile(file.read(), path, "exec"), {"__name__": "__main__", "__file__": path})
