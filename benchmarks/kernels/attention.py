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
BACK_ENDS = ("mosaic", "triton", "cudnn", "xla")
# The materialized scores S would not fit into memory.
LINEAR = ("mosaic", "triton", "cudnn")


def cases() -> list[Case]:
    found = [
        _forward(GPT2, bar="≥ 300 TFLOP/s, ≥ 1.0× cuDNN"),
        _backward(GPT2, bar="≥ 225 TFLOP/s, ≥ 1.0× cuDNN"),
        _both(GPT2, bar="≥ 1.15× cuDNN"),
        _backward(GPT2, back_ends=("mosaic", "triton", "xla"), deterministic=True),
    ]
    for shape in (LONG, LONG_128):
        found += [
            _forward(shape, back_ends=LINEAR, bar="≥ 0.85× cuDNN"),
            _backward(shape, back_ends=LINEAR, bar="≥ 0.95× cuDNN"),
        ]
    found += [
        _both(TF32, back_ends=("triton", "xla"), dtype=jnp.float32, bar="≥ 4× XLA"),
        _both(TF32, back_ends=("triton", "xla"), dtype=jnp.float32, precision="highest"),
    ]
    for window in (None, 256):
        found.append(
            _both(
                LONG,
                back_ends=LINEAR,
                window=window,
                bar="≤ 0.25× of full causal" if window else "",
            )
        )
    kernels = ("mosaic", "triton")
    for shape, how in ((GPT2, {"documents": 1024}), (PACKED, {"documents": 2048, "window": 1408})):
        found += [f(shape, back_ends=kernels, **how) for f in (_forward, _backward)]
    found += [
        _forward(PACKED, ("mosaic",), window=1408),
        _backward(PACKED, ("mosaic",), window=1408),
    ]
    return [*found, _forward(VERY_LONG, back_ends=LINEAR), _both(VERY_LONG, back_ends=LINEAR)]


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


def _case(what, shape, run, dtype, how, factor, *, torch=None, prepare=None, bar):
    return Case(
        kernel="flash_attention",
        name=_name(what, shape, dtype, how),
        make=lambda key: normal(key, shape, (*shape[:2], 3, *shape[2:]), dtype=dtype),  # dy, qkv
        run=run,
        prepare=prepare or {},
        torch=torch or {},
        flops=factor * _flops(shape, how.get("window"), how.get("documents")),
        bound="bf16",
        bar=bar,
    )


def _forward(shape, back_ends=BACK_ENDS, dtype=jnp.bfloat16, bar="", both=False, **how):
    run = {name: passes(_attention(name, **how), both) for name in back_ends}
    torch = (
        {name: functools.partial(_in_torch, name, both) for name in _TORCH[dtype]}
        if not {"window", "documents"} & how.keys()
        else {}
    )
    what, factor = ("forward and backward", 3.5) if both else ("forward", 1)
    return _case(what, shape, run, dtype, how, factor, torch=torch, bar=bar)


_both = functools.partial(_forward, both=True)


def _backward(shape, back_ends=BACK_ENDS, dtype=jnp.bfloat16, bar="", **how):
    def prepare(name):
        # Each implementation saves different arrays for the backward pass. The forward pass runs
        # before the timed part.
        return lambda dy, qkv: (dy, jax.vjp(_attention(name, **how), qkv)[1])

    run = {name: lambda dy, pull: pull(dy) for name in back_ends}
    return _case(
        "backward",
        shape,
        run,
        dtype,
        how,
        2.5,
        prepare={name: prepare(name) for name in back_ends},
        bar=bar,
    )


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
