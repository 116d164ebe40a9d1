"""Chapter 6: data.

Tokens are NumPy arrays of bytes 0…255, and 256 (END_OF_TEXT) before each document. They stay on
the CPU until a batch goes to the device.

Shapes: N tokens, B batch, T time.
"""

import numpy as np
from tiny import END_OF_TEXT


def encode(documents):
    """Return the tokens of all documents, int32: END_OF_TEXT before each, then its UTF-8 bytes."""
    parts = [[END_OF_TEXT, *document.encode("utf-8")] for document in documents]
    return np.concatenate(parts).astype(np.int32)


def count_windows(tokens_N, length):
    """Return the number of windows: T tokens each, and one more token as the last target."""
    return (len(tokens_N) - 1) // length


def window(tokens_N, index, length):
    """Return the window's T + 1 tokens, beginning with token index·T.

    Adjacent windows share one token, so every token but the first is a target once.
    """
    start = index * length
    return tokens_N[start : start + length + 1]


def order(seed, epoch, count):
    """Return the windows of an epoch in random order: a permutation of 0…count − 1.

    The seed and the epoch determine the order, and each epoch has another one.
    """
    return np.random.default_rng([seed, epoch]).permutation(count)


def batch(tokens_N, step, size, length, seed):
    """Return the windows of a training step, of shape (B, T + 1).

    Step s has the positions s·B … s·B + B − 1 of the epochs, one after the other. The batch depends
    on no other state, so a run that stops after step s resumes with step s + 1.
    """
    count = count_windows(tokens_N, length)
    rows = []
    for position in range(step * size, (step + 1) * size):
        epoch, place = divmod(position, count)
        rows.append(window(tokens_N, order(seed, epoch, count)[place], length))
    return np.stack(rows)
