"""Causal attention of separate q, k and v, compared with FlashAttention-3 and cuDNN.

    pip install --no-deps flash-attn3-jax==0.2.3 einops
    python -m gptjax.bench kernels benchmarks/rivals/flash_attention3.py

The cases are those of benchmarks/kernels/attention_separate.py. The three alternate. The wheel of
FlashAttention-3 has kernels for Hopper and D = 128 only; D = 64 is compared with cuDNN.
"""

import functools
import importlib.metadata
import sys
from pathlib import Path

from flash_attn3_jax import flash_mha

from gptjax.bench.harness import Case

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from attention_separate import case

# B, T, H query heads, K key heads, D
SHAPES = (
    (4, 4096, 16, 16, 128),
    (4, 4096, 16, 4, 128),
    (1, 16384, 16, 4, 128),
    (16, 1024, 12, 12, 64),
)


def cases() -> list[Case]:
    name = f"flash-attn3-jax {importlib.metadata.version('flash-attn3-jax')}"
    rivals = {name: functools.partial(flash_mha, is_causal=True)}
    return [
        case(*shape, None, both=both, rivals=rivals if shape[-1] == 128 else None)
        for both in (True, False)
        for shape in SHAPES
    ]
