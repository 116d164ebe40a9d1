"""`dataset.json`, which lies beside the shards that gptjax made and says what they are.

    {"format": 1, "tokenizer": "gpt2", "vocab_size": 50257, "eot": 50256, "source": "...",
     "shards": {"NAME_train_000001.bin": {"tokens": 100000000, "max_token": 50256}, ...}}

It is written last, so a folder of gptjax's own that has one is complete.
"""

import dataclasses
import json
from pathlib import Path

import numpy as np

from gptjax.data.shards import write_atomically

SIDECAR = "dataset.json"
FORMAT = 1


class DatasetError(ValueError):
    """A dataset that is not there, is not complete, or does not fit what it is asked for."""


@dataclasses.dataclass(frozen=True)
class ShardInfo:
    tokens: int
    max_token: int  # the largest id in the shard

    @classmethod
    def of(cls, tokens: np.ndarray) -> "ShardInfo":
        return cls(tokens=int(tokens.size), max_token=int(tokens.max()))


@dataclasses.dataclass(frozen=True)
class Sidecar:
    tokenizer: str
    vocab_size: int
    eot: int
    source: str  # where the text came from, in words
    shards: dict[str, ShardInfo]  # by file name

    def write(self, folder: Path) -> None:
        text = json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"
        write_atomically(folder / SIDECAR, text.encode())


def read_sidecar(folder: Path) -> Sidecar | None:
    """The sidecar of `folder`, or None where there is none.

    Raises:
        DatasetError: there is one and it cannot be understood.
    """
    path = folder / SIDECAR
    try:
        fields = json.loads(path.read_bytes())
        if fields["format"] != FORMAT:
            raise ValueError(f"format {fields['format']!r}")
        return Sidecar(
            tokenizer=str(fields["tokenizer"]),
            vocab_size=int(fields["vocab_size"]),
            eot=int(fields["eot"]),
            source=str(fields["source"]),
            shards={
                name: ShardInfo(tokens=int(info["tokens"]), max_token=int(info["max_token"]))
                for name, info in fields["shards"].items()
            },
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"{path}: expected a description of shards, format {FORMAT}, found {type(error).__name__}: {error}; "
            "remove this folder and prepare it again with `python -m gptjax.data`"
        ) from error
