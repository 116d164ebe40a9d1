"""Causal attention of separate q, k and v, compared with cuDNN.

    python -m gptjax.bench kernels benchmarks/kernels/attention_separate.py

No implementation copies its inputs, unlike in attention.py, whose q, k and v are one packed array.
"auto" is `flash_attention` with its default back end; "cudnn" is `jax.nn.dot_product_attention`.
The two alternate. TFLOP/s count as in attention.py.
"""

import functools

import jax
import numpy as np

from gptjax.bench.harness import Case, normal, passes
from pallas_kernels import flash_attention

# B, T, H query heads, K key heads, D, window
SHAPES = (
    (16, 1024, 16, 16, 128, None),
    (4, 4096, 16, 16, 128, None),
    (1, 32768, 16, 16, 128, None),
    (16, 1024, 12, 12, 64, None),
    (1, 32768, 12, 12, 64, None),
    (16, 1024, 16, 4, 128, None),
    (1, 16384, 16, 4, 128, None),
    (1, 32768, 16, 4, 128, None),
    (16, 1024, 16, 4, 64, None),
    (4, 4096, 16, 4, 128, 1024),
    (4, 4096, 16, 4, 64, 1024),
)


def cases() -> list[Case]:
    return [case(*shape, both=both) for shape in SHAPES for both in (False, True)]


def case(b, t, h, k, d, window, *, both, rivals=None) -> Case:
    """Return the case of a shape. `rivals` are more causal attention functions of (q, k, v)."""
    attend = {
        "auto": functools.partial(flash_attention, window=window),
        "cudnn": functools.partial(
            jax.nn.dot_product_attention,
            is_causal=True,
            local_window_size=window and (window - 1, 0),
            implementation="cudnn",
        ),
        **(rivals or {}),
    }
    what = "forward and backward" if both else "forward"
    size = f"B={b} T={t} H={h}/{k} D={d} bf16" + (f", window {window}" if window else "")
    keys = np.minimum(np.arange(t) + 1, window or t).sum(dtype=float)
    return Case(
        kernel="flash_attention",
        name=f"{what} {size}",
        make=lambda key: normal(key, *2 * [(b, t, h, d)], *2 * [(b, t, k, d)]),  # dy, q, k, v
        run={name: passes(f, both) for name, f in attend.items()},
        flops=(3.5 if both else 1) * 4 * b * h * d * keys,
        bound="bf16",
        bar="≥ 1.0× cuDNN" if both else "",
        alternate=True,
    )
