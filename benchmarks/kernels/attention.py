"""Causal attention from the packed projection to its gradient.

    python -m gptjax.bench kernels benchmarks/kernels/attention.py

TFLOP/s count the unmasked part of the two matmuls of the forward pass, and 2.5 times as much for
the backward pass. Documents have random lengths up to a maximum. The times include the computation
of the documents' bounds. q, k and v are one packed array, and the gradient is packed too: the times
include the copies that an implementation needs. The time of PyTorch's backward pass is the time of
"forward and backward" minus the time of "forward".
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from gptjax.bench.harness import Case, normal, passes, passes_in_torch
from pallas_kernels import flash_attention_qkv

GPT2 = (64, 1024, 12, 64)
LONG = (16, 4096, 12, 64)
LONG_128 = (16, 4096, 6, 128)
TF32 = (32, 1024, 12, 64)
VERY_LONG = (1, 65536, 12, 64)
# The last stage of the modded-nanogpt speedrun.
PACKED = (1, 49152, 6, 128)
ALL = ("mosaic", "triton", "cudnn", "xla")
# The materialized scores S would not fit into memory.
LINEAR = ("mosaic", "triton", "cudnn")
KERNELS, PLAIN = ("mosaic", "triton"), ("triton", "xla")
FORWARD, BACKWARD, BOTH = "forward", "backward", "forward and backward"
FACTORS = {FORWARD: 1, BACKWARD: 2.5, BOTH: 3.5}
# Passes, shape, back ends, target, options
CASES = (
    (FORWARD, GPT2, ALL, "≥ 300 TFLOP/s, ≥ 1.0× cuDNN", {}),
    (BACKWARD, GPT2, ALL, "≥ 225 TFLOP/s, ≥ 1.0× cuDNN", {}),
    (BOTH, GPT2, ALL, "≥ 1.15× cuDNN", {}),
    (BACKWARD, GPT2, ("mosaic", "triton", "xla"), "", {"deterministic": True}),
    (FORWARD, LONG, LINEAR, "≥ 0.85× cuDNN", {}),
    (BACKWARD, LONG, LINEAR, "≥ 0.95× cuDNN", {}),
    (FORWARD, LONG_128, LINEAR, "≥ 0.85× cuDNN", {}),
    (BACKWARD, LONG_128, LINEAR, "≥ 0.95× cuDNN", {}),
    (BOTH, TF32, PLAIN, "≥ 4× XLA", {}),
    (BOTH, TF32, PLAIN, "", {"precision": "highest"}),
    (BOTH, LONG, LINEAR, "", {"window": None}),
    (BOTH, LONG, LINEAR, "≤ 0.25× of full causal", {"window": 256}),
    (FORWARD, GPT2, KERNELS, "", {"documents": 1024}),
    (BACKWARD, GPT2, KERNELS, "", {"documents": 1024}),
    (FORWARD, PACKED, KERNELS, "", {"documents": 2048, "window": 1408}),
    (BACKWARD, PACKED, KERNELS, "", {"documents": 2048, "window": 1408}),
    (FORWARD, PACKED, ("mosaic",), "", {"window": 1408}),
    (BACKWARD, PACKED, ("mosaic",), "", {"window": 1408}),
    (FORWARD, VERY_LONG, LINEAR, "", {}),
    (BOTH, VERY_LONG, LINEAR, "", {}),
)


def cases() -> list[Case]:
    return [_case(*case) for case in CASES]


def _name(what, shape, dtype, how):
    size = {
        jnp.float32: "true fp32" if how.get("precision") else "fp32 as TF32",
        jnp.bfloat16: "bf16",
    }[dtype]
    extra = [f"window {how['window']}"] if how.get("window") else []
    extra += [f"documents ≤ {how['documents']}"] if how.get("documents") else []
    extra += ["deterministic"] if how.get("deterministic") else []
    return f"{what} B={shape[0]} T={shape[1]} H={shape[2]} D={shape[3]} {', '.join([size, *extra])}"


def _flops(shape, window, documents):
    b, t, h, d = shape
    ids_BT = _segment_ids(b, t, documents) if documents else np.zeros((b, t), np.int32)
    begins_BT = np.diff(ids_BT, axis=1, prepend=-1) != 0
    first_BT = np.maximum.accumulate(np.where(begins_BT, np.arange(t), 0), axis=1)
    keys_BT = np.minimum(np.arange(t) - first_BT + 1, window or t)
    return 4 * h * d * keys_BT.sum(dtype=float)


@functools.cache
def _segment_ids(b, t, longest):
    """Return the document of each token; lengths are uniform in 1 … longest."""
    rng = np.random.default_rng(0)
    ends_BN = rng.integers(1, longest + 1, (b, t)).cumsum(axis=1)
    ids = [np.searchsorted(ends, np.arange(t), side="right") for ends in ends_BN]
    return np.stack(ids).astype(np.int32)


def _attention(name, documents=None, **how):
    def attend(qkv):
        segments = {}
        if documents:
            ids_BT = _segment_ids(*qkv.shape[:2], documents)
            # Not a constant: XLA would compute the bounds during compilation.
            segments["segment_ids"] = ids_BT + (0 * qkv[0, 0, 0, 0, 0]).astype(jnp.int32)
        return flash_attention_qkv(qkv, implementation=name, **segments, **how)

    return attend


def _case(what, shape, back_ends, bar, how):
    attend = {name: _attention(name, **how) for name in back_ends}
    dtype, prepare, torch = jnp.float32 if shape == TF32 else jnp.bfloat16, {}, {}
    run = {name: passes(f, what == BOTH) for name, f in attend.items()}
    if what == BACKWARD:
        # Each implementation saves different arrays for the backward pass. The forward pass runs
        # before the timed part.
        run = dict.fromkeys(back_ends, lambda dy, pull: pull(dy))
        prepare = {name: functools.partial(_saved, f) for name, f in attend.items()}
    elif not {"window", "documents"} & how.keys():
        torch = {name: functools.partial(_in_torch, name, what == BOTH) for name in _TORCH[dtype]}
    return Case(
        kernel="flash_attention",
        name=_name(what, shape, dtype, how),
        make=lambda key: normal(key, shape, (*shape[:2], 3, *shape[2:]), dtype=dtype),  # dy, qkv
        run=run,
        prepare=prepare,
        torch=torch,
        flops=FACTORS[what] * _flops(shape, how.get("window"), how.get("documents")),
        bound="bf16",
        bar=bar,
    )


def _saved(attend, dy, qkv):
    return dy, jax.vjp(attend, qkv)[1]


_TORCH = {jnp.bfloat16: ("torch cudnn", "torch flash"), jnp.float32: ("torch",)}


def _in_torch(name, both, torch):
    """Return PyTorch's scaled_dot_product_attention, restricted to one back end."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.set_float32_matmul_precision("high")
    back_end = {
        "torch cudnn": SDPBackend.CUDNN_ATTENTION,
        "torch flash": SDPBackend.FLASH_ATTENTION,
        "torch": SDPBackend.EFFICIENT_ATTENTION,
    }[name]

    def forward(qkv):
        # B·T·3·H·D → three views of B·H·T·D
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        with sdpa_kernel(back_end):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    gradients = passes_in_torch(torch, forward)
    return lambda dy, qkv: gradients(dy.transpose(1, 2), qkv) if both else forward(qkv)
