"""Loss masks: the tokens of a shard that are targets of the loss.

The shard NAME.bin has its mask in the file NAME.mask of the same folder. A mask has the layout of a
shard, with another magic number and one byte per token. The byte is 1 if the token counts as a
target, 0 if not (a token of a prompt). A dataset has masks for all shards, or none.
"""

from pathlib import Path
from typing import ClassVar

import numpy as np

from gptjax.data.shards import Shard, header, shard_error, token_offset
from gptjax.files import write_atomically

MAGIC = 20261122
_DO = "restore the file, or prepare the dataset again with `python -m gptjax.data`"


class Mask(Shard):
    """The loss mask of a shard, read by position.

    Attributes:
        path, size, stamp: see `Shard`.
    """

    magic: ClassVar[int] = MAGIC
    dtype: ClassVar[np.dtype] = np.dtype("u1")
    description: ClassVar[str] = "a loss mask of gptjax's"

    @classmethod
    def of(cls, shard: Shard, stamp: tuple[int, int] | None = None) -> "Mask":
        """Open the mask of a shard.

        Raises:
            ShardError: the errors of `Shard`, or the mask does not have one byte per token of the
                shard.
        """
        path = mask_path(shard.path)
        if not path.exists():
            raise shard_error(
                path, 0, expected=f"the loss mask of {shard.path.name}", found="no file", do=_DO
            )
        mask = cls(path, stamp)
        if mask.size != shard.size:
            raise shard_error(
                path,
                8,
                expected=f"the {shard.size} tokens of {shard.path.name}",
                found=f"{mask.size}",
                do=_DO,
            )
        return mask

    def read(self, begin: int, count: int) -> np.ndarray:
        """Read the bytes of tokens begin .. begin + count - 1, read-only uint8 of shape (count,).

        Raises:
            ShardError: the errors of `Shard.read`, or a byte is neither 0 nor 1.
        """
        counts = super().read(begin, count)
        if counts.max(initial=0) > 1:
            bad = int(np.argmax(counts > 1))
            raise shard_error(
                self.path,
                token_offset(begin + bad, 1),
                expected="0 or 1",
                found=f"{counts[bad]}",
                do=_DO,
            )
        return counts


def mask_path(shard: Path) -> Path:
    """Return the path of a shard's loss mask."""
    return shard.with_suffix(".mask")


def write_mask(path: Path, counts: np.ndarray) -> None:
    """Write a loss mask atomically.

    Args:
        path: the file to create or replace.
        counts: uint8 of shape (tokens,), 1 for a token that counts as a target, else 0.

    Raises:
        OSError: writing failed. No temporary file is left.
    """
    write_atomically(path, header(MAGIC, counts.size), counts.astype("u1", copy=False))
