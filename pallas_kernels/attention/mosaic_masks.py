"""Masks of the Mosaic kernels of flash attention: the hidden scores of a tile.

Shapes: M queries and N keys of a tile of the forward pass; the backward pass has keys as rows, and
its tiles are `HALF` keys × queries.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import pl, plgpu

HALF = 64
"""Keys of one multiplying warpgroup of the backward pass."""
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of one number for each row, and column, of a tile."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """What queries see.

    Attributes:
        bounds: the padded bounds of documents in global memory (`documents.padded`), or None. They
            contain the window.
    """

    causal: bool
    window: int | None
    length: int
    bounds: Any

    def hide(self, s_MN, b, query, key, hidden, columns):
        """Return scores of queries from `query` on and keys from `key` on; hidden ones replaced.

        Args:
            hidden: replacement, finite.
            columns: with documents the numbers 0, 1, … in shared memory, one for each key.
        """
        if self.bounds is None:
            query_MN = _iota(s_MN.shape, 0) + query
            key_MN = _iota(s_MN.shape, 1) + key
            seen_MN = key_MN <= query_MN if self.causal else key_MN < self.length
            if self.window is not None:
                seen_MN &= key_MN > query_MN - self.window
            return jnp.where(seen_MN, s_MN, hidden)
        first_M, last_M = (self._of_rows(which, b, query, s_MN.shape[0]) for which in (0, 1))
        if self.causal:
            rows_M = plgpu.broadcasted_iota(jnp.int32, s_MN.shape[:1], 0, layout=ROWS)
            last_M = rows_M + query
        columns_MN = _columns(columns.at[pl.ds(0, s_MN.shape[1])], s_MN.shape)
        seen_MN = lax.broadcast_in_dim(first_M - key, s_MN.shape, [0]) <= columns_MN
        seen_MN &= columns_MN <= lax.broadcast_in_dim(last_M - key, s_MN.shape, [0])
        return jnp.where(seen_MN, s_MN, hidden)

    def hide_transposed(self, x, b, key, query, columns):
        """Return x, keys×queries from `key` and `query` on, with −∞ if the query does not see the
        key.

        Args:
            columns: the numbers 0, 1, … in shared memory, one for each query.
        """
        keys = key + _iota(x.shape, 0)
        if not self.causal and self.bounds is None:
            return jnp.where(keys < self.length, x, -jnp.inf)
        columns = _columns(columns, x.shape)
        first = keys
        if self.bounds is not None and not self.causal:
            first = lax.broadcast_in_dim(self._of_rows(0, b, key, HALF), x.shape, [0])
        seen = columns >= first - query
        if self.bounds is not None:
            last = self._of_rows(1, b, key, HALF) - query
            seen &= columns <= lax.broadcast_in_dim(last, x.shape, [0])
        elif self.window is not None:
            seen &= columns < keys - query + self.window
        return jnp.where(seen, x, -jnp.inf)

    def on_an_edge(self, key, query, queries, seen_by):
        """Return whether some of `HALF` keys are not seen by some of a block of queries.

        Args:
            seen_by: the first and the last query that see all of the keys, by the documents.
        """
        if self.bounds is not None:
            edge = query + (queries - 1) > seen_by[1]
            return edge | (query < (key + HALF - 1 if self.causal else seen_by[0]))
        if not self.causal:
            return key + HALF > self.length
        edge = query < key + HALF - 1
        if self.window is not None:
            edge |= query + queries - 1 >= key + self.window
        return edge

    def seen_by(self, b, key):
        """Return the first and the last query that see all of `HALF` keys, by the documents."""
        if self.bounds is None:
            return None
        return self.bounds.first_BT[b, key + (HALF - 1)], self.bounds.last_BT[b, key]

    def _of_rows(self, which, b, start, rows):
        """Return the first (0) or last (1) bound of each row from `start` on."""
        source = self.bounds[which].at[b, pl.ds(start, rows)]
        return plgpu.load(source, layout=ROWS, optimized=False)


def fill_columns(columns) -> None:
    """Store 0, 1, … in shared memory."""
    columns[...] = plgpu.broadcasted_iota(jnp.int32, columns.shape, 0, layout=COLUMNS)
    plgpu.commit_smem()


def _columns(columns, shape):
    """Return the index of each column, from shared memory: the compiler keeps the results of an
    iota in registers, and spills them."""
    columns = plgpu.load(columns, layout=COLUMNS, optimized=False)
    return lax.broadcast_in_dim(columns, shape, [1])


def _iota(shape, axis):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
