"""Options and masks of a call of flash attention.

Shapes: B batch, T queries, S keys.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention.choice import is_true_fp32
from pallas_kernels.attention.documents import Ranges, document_bounds, ranges


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call. The back ends receive a float as `scale`."""

    causal: bool = True
    scale: float | None = None
    window: Any = None
    """For back ends an integer or None. None, if the window covers the sequence or the bounds
    include it."""
    deterministic: bool = False
    precision: jax.lax.PrecisionLike = None
    softcap: float | None = None
    start: int | None = None
    """Position of query 0. For back ends an integer. 0 … S − T if `causal`, except for `Ranges`."""

    def position(self, query):
        """Return the position of a query among the keys."""
        return query + self.start if self.start else query

    @property
    def true_fp32(self) -> bool:
        """Whether fp32 matmuls are true fp32, not TF32."""
        return is_true_fp32(self.precision)


class Masks(NamedTuple):
    """Array arguments that mask: `segment_ids` and `key_range`."""

    segment_ids: Any
    key_range: Any = None


def masked(options: Options, masks: Masks, q_BTHD, k_BSKD):
    """Return the options for back ends, and the bounds.

    The bounds are `Ranges` if causal masks, windows and documents of the kernels do not express the
    call. Else the bounds are `Documents`, or None without segment ids. A causal query has a
    position among the keys.
    """
    length, keys = q_BTHD.shape[1], k_BSKD.shape[1]
    start = keys - length if options.start is None else options.start
    window, ids = options.window, masks.segment_ids
    left, right = window if isinstance(window, tuple) else (window and window - 1, None)
    right = 0 if options.causal else right
    inside, pair = 0 <= start <= keys - length, isinstance(ids, tuple)
    # The window covers the keys before the queries; the queries see all keys after them.
    if left is not None and start + length - 1 <= left:
        left = None
    if right is not None and keys != length and start + right >= keys - 1:
        right = None
    options = dataclasses.replace(options, causal=False, window=None, start=start)
    if masks.key_range is None and not pair and (left is right is None or inside and right == 0):
        window = None if left is None else left + 1
        options = dataclasses.replace(options, causal=right == 0, window=window)
        return options, None if ids is None else document_bounds(ids, window=window)
    others = [] if masks.key_range is None else [masks.key_range]
    if ids is not None and not pair:
        others = [document_bounds(ids), *others]
    sizes = q_BTHD.shape[0], length, keys
    return options, ranges(*sizes, start, (left, right), others, ids if pair else None)


def without_start(options: Options, bounds, q_BTHD, k_BSKD):
    """Return the options and bounds in which the same causal mask is `Ranges` if the number of keys
    is not that of queries."""
    if not options.causal or q_BTHD.shape[1] == k_BSKD.shape[1]:
        return options, bounds
    left = None if options.window is None else options.window - 1
    bounds = ranges(*q_BTHD.shape[:2], k_BSKD.shape[1], options.start, (left, 0))
    return dataclasses.replace(options, causal=False, window=None), bounds


def visible(options, queries, keys, bounds):
    """Return the mask of the keys s that each query t sees, B·T·S or 1·T·S; None for all."""
    if not options.causal and bounds is None:
        return None
    visible_BTS = jnp.ones((1, queries, keys), bool)
    if options.causal:
        t_T1 = jnp.arange(options.start, options.start + queries)[:, None]
        s_1S = jnp.arange(keys)[None, :]
        visible_BTS &= (s_1S <= t_T1)[None]
        if options.window is not None:
            visible_BTS &= (s_1S > t_T1 - options.window)[None]
    if bounds is not None:
        s_11S = jnp.arange(keys, dtype=jnp.int32)[None, None]
        visible_BTS = visible_BTS & (bounds.first_BT[:, :, None] <= s_11S)
        visible_BTS = visible_BTS & (s_11S <= bounds.last_BT[:, :, None])
    if isinstance(bounds, Ranges) and bounds.key_ids_BS is not None:
        visible_BTS &= bounds.query_ids_BT[:, :, None] == bounds.key_ids_BS[:, None]
    return visible_BTS
