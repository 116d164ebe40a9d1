"""Checks of the arguments of the attention functions."""

import inspect
import itertools
from collections.abc import Callable
from typing import SupportsIndex

import jax.numpy as jnp

from pallas_kernels import _arguments
from pallas_kernels._dispatch import DTYPES

SWAP = "Swap axes 1 and 2 of arrays of shape (batch, heads, time, head_dim): jnp.swapaxes(x, 1, 2)"
# Name in other libraries: the option, and the answer of a function that has the option.
_HINTS = {
    "is_causal": ("causal", "the option is named causal, and is True by default"),
    "mask": (
        "bias",
        "an arbitrary mask is a bias of 0 and −∞; window, segment_ids and key_range skip tiles",
    ),
    "attn_mask": (
        "bias",
        "an arbitrary mask is a bias of 0 and −∞; causal=False turns the causal mask off",
    ),
    "dropout_p": ("dropout", ""),
    "logits_soft_cap": ("softcap", "the option is named softcap"),
    "local_window_size": ("window", "the option is named window"),
}
_WITHOUT = {
    "causal": "every call is causal",
    "bias": "only flash_attention has arbitrary masks, as a bias of 0 and −∞",
    "window": "it has no windows, flash_attention has",
    "dropout": "there is no dropout",
}


def with_hints[**P, R](f: Callable[P, R]) -> Callable[P, R]:
    """Wrap f: wrong options raise a TypeError that says what to write."""
    parameters = inspect.signature(f).parameters
    hints = {name: text for name, text in _WITHOUT.items() if name not in parameters}
    for name, (option, hint) in _HINTS.items():
        hints[name] = hint if option in parameters else _WITHOUT[option]
    return _arguments.with_hints(hints, ("scale", "window", "softcap", "query_start"))(f)


def check(name, q_BTHD, k_BSKD, v_BSKE, options, masks, sinks_H, bias=None):
    """Raise for wrong shapes, dtypes and options of the function `name`."""

    def expected(expectation, got):
        raise ValueError(f"{name}: expected {expectation}, got {got}")

    shapes = f"{q_BTHD.shape}, {k_BSKD.shape}, {v_BSKE.shape}"
    if not (
        q_BTHD.ndim == k_BSKD.ndim == v_BSKE.ndim == 4
        and k_BSKD.shape[:3] == v_BSKE.shape[:3]
        and (q_BTHD.shape[0], q_BTHD.shape[3]) == (k_BSKD.shape[0], k_BSKD.shape[3])
        and min(*q_BTHD.shape[2:], *k_BSKD.shape[2:], v_BSKE.shape[3]) >= 1
        and (k_BSKD.shape[1] or not q_BTHD.shape[1])
    ):
        expected(
            "q of shape (batch, time, heads, head_dim), k and v of shape (batch, keys, key heads, "
            "head_dim), with keys, heads and channels",
            shapes,
        )
    (t, h), k = q_BTHD.shape[1:3], k_BSKD.shape[2]
    if h % k or h > max(256, t):  # the axes of heads and time may be swapped
        expected(
            "(batch, time, heads, head_dim) with heads a multiple of key heads",
            f"{q_BTHD.shape}, {k_BSKD.shape}: {h} heads of {t} tokens. {SWAP}",
        )
    if not q_BTHD.dtype == k_BSKD.dtype == v_BSKE.dtype:
        expected("one dtype for q, k, v", f"{q_BTHD.dtype}, {k_BSKD.dtype}, {v_BSKE.dtype}")
    if q_BTHD.dtype not in DTYPES:
        expected("float32, bfloat16 or float16", q_BTHD.dtype)
    b, s = k_BSKD.shape[:2]

    def integers(argument, x, shape):
        if x.shape != shape or not jnp.issubdtype(x.dtype, jnp.integer):
            expected(f"{argument} of shape {shape} in integers", f"{x.shape} in {x.dtype}")

    if isinstance(masks.segment_ids, tuple):
        for x, length, of in zip(masks.segment_ids, (t, s), ("queries", "keys"), strict=True):
            integers(f"segment_ids of {of}", x, (b, length))
    elif masks.segment_ids is not None:
        integers("segment_ids", masks.segment_ids, (b, t))
        if t != s:
            expected("a pair of segment_ids, of queries and of keys", f"{t} queries and {s} keys")
    for x in masks.key_range or ():
        integers("key_range", x, (b, t))
    window = options.window
    if isinstance(window, tuple):
        if len(window) != 2 or any(x is not None and not _is_integer(x, 0) for x in window):
            expected("a window of two integers of at least 0 or None", f"{window=}")
    elif window is not None and not (options.causal and _is_integer(window, 1)):
        raise ValueError(
            f"{name}: a window needs causal=True and an integer size of at least 1, got "
            f"causal={options.causal} {window=}. Without causal, pass window=(left, right)"
        )
    if options.softcap is not None and not options.softcap > 0:
        expected("a positive softcap", options.softcap)
    if sinks_H is not None and sinks_H.shape != (h,):
        expected(f"sinks_H of shape {(h,)}", sinks_H.shape)
    if bias is not None:
        shape = bias.shape
        if bias.dtype not in (q_BTHD.dtype, jnp.float32):
            expected(f"a bias in {q_BTHD.dtype} or float32", bias.dtype)
        if shape != (h,) and shape not in itertools.product((1, b), (1, h), (t,), (s,)):
            expected(f"slopes of shape {(h,)} or a bias of shape {(b, h, t, s)}", shape)


def _is_integer(x, least):
    return isinstance(x, SupportsIndex) and x >= least
