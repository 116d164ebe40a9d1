"""Chapter 6: data.

Tokens are NumPy arrays of bytes 0…255, and 256 (END_OF_TEXT) before each document. They stay on
the CPU until a batch goes to the device.

Shapes: N tokens, B batch, T time.
"""

# ruff: noqa: F401 (the TODOs use the imports)

import numpy as np
from tiny import END_OF_TEXT


def encode(documents):
    """Return the tokens of all documents, int32: END_OF_TEXT before each, then its UTF-8 bytes."""
    raise NotImplementedError("TODO: END_OF_TEXT, then the bytes of each document")


def count_windows(tokens_N, length):
    """Return the number of windows: T tokens each, and one more token as the last target."""
    raise NotImplementedError("TODO: every window needs T + 1 tokens, and shares one")


def window(tokens_N, index, length):
    """Return the window's T + 1 tokens, beginning with token index·T.

    Adjacent windows share one token, so every token but the first is a target once.
    """
    raise NotImplementedError("TODO: a slice of T + 1 tokens")


def order(seed, epoch, count):
    """Return the windows of an epoch in random order: a permutation of 0…count − 1.

    The seed and the epoch determine the order, and each epoch has another one.
    """
    raise NotImplementedError("TODO: np.random.default_rng of the seed and the epoch")


def batch(tokens_N, step, size, length, seed):
    """Return the windows of a training step, of shape (B, T + 1).

    Step s has the positions s·B … s·B + B − 1 of the epochs, one after the other. The batch depends
    on no other state, so a run that stops after step s resumes with step s + 1.
    """
    raise NotImplementedError("TODO: divmod(position, count) is the epoch and the place in it")
