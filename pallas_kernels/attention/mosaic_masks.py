"""Masks of the Mosaic kernels of flash attention: the hidden scores of a tile.

Shapes: M queries and N keys of a tile of the forward pass. A tile of the backward pass has `HALF`
keys as rows and `HALF` queries as columns.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic import pl, plgpu

HALF = 64
"""Keys, and queries, of a tile of the backward pass."""
ROWS, COLUMNS = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
"""Layouts of vectors with one number per row of a tile, and with one number per column."""


@dataclasses.dataclass(frozen=True)
class Mask:
    """Mask of the keys that queries see.

    Queries are named by their positions among the keys.

    Attributes:
        options: `Options`.
        keys: number of keys.
        bounds: the padded bounds of documents in global memory (`documents.padded`), or None. The
            bounds include the window.
    """

    options: Any
    keys: int
    bounds: Any

    def hide(self, s_MN, b, query, key, hidden, columns):
        """Replace the hidden scores of a tile with queries from `query` on and keys from `key` on.

        Args:
            hidden: finite replacement.
            columns: with documents the numbers 0, 1, … in shared memory, one for each key.
        """
        if self.bounds is None:
            query_MN = _iota(s_MN.shape, 0) + query
            key_MN = _iota(s_MN.shape, 1) + key
            seen_MN = key_MN <= query_MN if self.options.causal else key_MN < self.keys
            if self.options.window is not None:
                seen_MN &= key_MN > query_MN - self.options.window
            return jnp.where(seen_MN, s_MN, hidden)
        first_M, last_M = (self._of_rows(which, b, query, s_MN.shape[0]) for which in (0, 1))
        if self.options.causal:
            rows_M = plgpu.broadcasted_iota(jnp.int32, s_MN.shape[:1], 0, layout=ROWS)
            last_M = rows_M + query
        columns_MN = _columns(columns.at[pl.ds(0, s_MN.shape[1])], s_MN.shape)
        seen_MN = lax.broadcast_in_dim(first_M - key, s_MN.shape, [0]) <= columns_MN
        seen_MN &= columns_MN <= lax.broadcast_in_dim(last_M - key, s_MN.shape, [0])
        return jnp.where(seen_MN, s_MN, hidden)

    def hide_transposed(self, x, b, key, query, columns, hidden):
        """Replace the hidden scores of x. x is keys×queries, from `key` and `query` on.

        Args:
            columns: the numbers 0, 1, … in shared memory, one for each query.
        """
        keys = key + _iota(x.shape, 0)
        if not self.options.causal and self.bounds is None:
            return jnp.where(keys < self.keys, x, hidden)
        columns = _columns(columns, x.shape)
        first = keys
        if self.bounds is not None and not self.options.causal:
            first = lax.broadcast_in_dim(self._of_rows(0, b, key, HALF), x.shape, [0])
        seen = columns >= first - query
        if self.bounds is not None:
            last = self._of_rows(1, b, key, HALF) - query
            seen &= columns <= lax.broadcast_in_dim(last, x.shape, [0])
        elif self.options.window is not None:
            seen &= columns < keys - query + self.options.window
        return jnp.where(seen, x, hidden)

    def on_an_edge(self, key, query, seen_by):
        """Return whether a tile needs a mask: some query does not see some of the `HALF` keys.

        Args:
            seen_by: with documents, the result of `seen_by`.
        """
        if self.bounds is not None:
            edge = query + (HALF - 1) > seen_by[1]
            return edge | (query < (key + HALF - 1 if self.options.causal else seen_by[0]))
        if not self.options.causal:
            return key + HALF > self.keys
        edge = query < key + HALF - 1
        if self.options.window is not None:
            edge |= query + HALF - 1 >= key + self.options.window
        return edge

    def hides_all(self, key, query, seen_by):
        """Return whether no query of a tile sees any of the `HALF` keys."""
        if not self.options.causal and self.bounds is None:
            return key >= self.keys
        hidden = query + (HALF - 1) < (key if self.options.causal else seen_by[2])
        if self.bounds is not None:
            hidden |= query > seen_by[3]
        elif self.options.window is not None:
            hidden |= query >= key + (HALF - 1) + self.options.window
        return hidden

    def seen_by(self, b, key):
        """Return the first and the last query whose document bounds include all `HALF` keys, and
        the first and the last query whose bounds include any of the keys."""
        if self.bounds is None:
            return None
        first_BT, last_BT = self.bounds
        end = key + (HALF - 1)
        return first_BT[b, end], last_BT[b, key], first_BT[b, key], last_BT[b, end]

    def _of_rows(self, which, b, start, rows):
        """Return the first (0) or last (1) bound of each row from `start` on."""
        source = self.bounds[which].at[b, pl.ds(start, rows)]
        return plgpu.load(source, layout=ROWS, optimized=False)


def fill_columns(columns) -> None:
    """Store 0, 1, … in shared memory, as the bits of int32."""
    numbers = plgpu.broadcasted_iota(jnp.int32, columns.shape, 0, layout=COLUMNS)
    columns[...] = lax.bitcast_convert_type(numbers, columns.dtype)
    plgpu.commit_smem()


def _columns(columns, shape):
    """Load the index of each column from shared memory. The compiler would keep the results of an
    iota in registers, and spill registers."""
    columns = plgpu.load(columns, layout=COLUMNS, optimized=False)
    return lax.broadcast_in_dim(lax.bitcast_convert_type(columns, jnp.int32), shape, [1])


def _iota(shape, axis):
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
