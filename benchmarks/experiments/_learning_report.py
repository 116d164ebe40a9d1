"""Validation losses of several seeds: their mean, and the step at which a target is reached."""

import math

import numpy as np


def mean_curve(records: list[dict]) -> np.ndarray:
    """Return steps and the mean, minimum and maximum validation loss over the seeds, (4,
    validations); infinite after the end of a run that was not finite."""
    steps = max(([step for step, _ in record["val"]] for record in records), key=len)
    losses = np.full((len(records), len(steps)), np.inf)
    for row, record in zip(losses, records, strict=True):
        found = [math.inf if loss is None else loss for _, loss in record["val"]]
        row[: len(found)] = found
    return np.stack([steps, losses.mean(0), losses.min(0), losses.max(0)])


def reached(steps: np.ndarray, losses: np.ndarray, target: float) -> float | None:
    """Return the first step at which a curve, linear between its points, is at the target."""
    below = np.flatnonzero(losses <= target)
    if not len(below):
        return None
    i = below[0]
    if i == 0 or not np.isfinite(losses[i - 1]):
        return float(steps[i])
    return float(np.interp(-target, -losses[[i - 1, i]], steps[[i - 1, i]]))
