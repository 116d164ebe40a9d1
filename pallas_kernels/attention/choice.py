"""Choice of the back end of flash attention."""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import _dispatch
from pallas_kernels._dispatch import REFERENCE, XLA, BackEnd


@dataclasses.dataclass(frozen=True)
class Facts:
    """Properties of a call on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    length: int
    head_dim: int
    window: int | None = None
    segments: bool = False
    """Whether there are segment ids."""
    return_lse: bool = False
    deterministic: bool = False
    precision: jax.lax.PrecisionLike = None
    keys: int | None = None
    """Number of keys; None: `length`."""
    value_dim: int | None = None
    """Head dimension of the values; None: `head_dim`."""
    softcap: bool = False
    bias: bool = False
    ranges: bool = False
    """Whether the mask is more than a causal or a full mask, a window before the query, and
    documents of equally many queries and keys."""
    sinks: bool = False

    @property
    def triton_only(self) -> str | None:
        """What the other kernels would need to support the call, or None."""
        if self.value_dim not in (None, self.head_dim):
            return f"values of the head dimension of the keys, not {self.value_dim}"
        if self.bias:
            return "scores without a bias"
        if self.ranges:
            return "a causal or full mask, an integer window and documents, not other masks"
        return None

    @property
    def not_in_cudnn(self) -> str | None:
        """What cuDNN would need to support the call, or None."""
        if self.keys not in (None, self.length):
            return f"as many keys as queries, not {self.keys} and {self.length}"
        return "scores without a soft cap" if self.softcap else self.triton_only


def _why_not_cudnn(call: Facts) -> str | None:
    if _dispatch.capability() is None:
        return f"needs an NVIDIA GPU, and the default device is a {_dispatch.platform()}"
    if _dispatch.capability() < (8, 0):
        return f"needs compute capability 8.0 (Ampere) or later, not {_dispatch.capability()}"
    if (why := _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.not_in_cudnn:
        return f"supports {call.not_in_cudnn}"
    largest = 256 if _dispatch.capability() == (9, 0) else 128
    if call.head_dim % 8 or call.head_dim > largest:
        return (
            f"supports head dimensions of a multiple of 8 and at most {largest} here, not "
            f"{call.head_dim}"
        )
    if call.length % 2:
        return f"supports an even sequence length (needed by the backward pass), not {call.length}"
    if call.segments:
        return "does not support segment ids"
    if call.return_lse:
        return "drops the gradient of the log-sum-exp"
    if call.deterministic:
        return "sums the gradients in any order, and deterministic=True excludes that"
    return None


def _why_not_mosaic(call: Facts) -> str | None:
    if (why := _dispatch.why_not_mosaic() or _dispatch.why_not_16_bit(call.dtype)) is not None:
        return why
    if call.triton_only:
        return f"supports {call.triton_only}"
    if call.head_dim not in (64, 128):
        return f"supports a head dimension of 64 or 128, not {call.head_dim}"
    return None


def _why_not_triton(call: Facts) -> str | None:
    if (largest := max(call.head_dim, call.value_dim or 0)) > 256:
        return f"supports a head dimension of at most 256, not {largest}"
    return _dispatch.why_not_triton()


# Compute capability, matmul ("16": bf16 and fp16), head dimension, whether the window is at most an
# eighth of the sequence, order of the back ends. The first match applies; None matches all.
# Ordered by the time of forward plus backward pass in benchmarks/results/kernels/attention.json
# (H200). GPUs without a row were not measured: on these GPUs cuDNN comes first, and Triton is used
# where cuDNN cannot run.
FASTEST = (
    ((9, 0), "16", 64, True, ("triton", "mosaic", "cudnn", "xla")),
    ((9, 0), "16", 64, None, ("mosaic", "triton", "cudnn", "xla")),
    ((9, 0), "16", 128, None, ("mosaic", "cudnn", "triton", "xla")),
    (None, "16", None, None, ("cudnn", "triton", "xla")),
    (None, "tf32", None, None, ("triton", "xla")),
    ((9, 0), "fp32", 64, None, ("triton", "xla")),
    (None, "fp32", None, None, ("xla",)),
)
TRUE_FP32 = (
    *(jax.lax.Precision.HIGHEST, "highest", "float32"),
    *(jax.lax.DotAlgorithmPreset.F32_F32_F32, "F32_F32_F32"),
)


def is_true_fp32(precision: jax.lax.PrecisionLike) -> bool:
    """Return whether fp32 matmuls with this precision are true fp32, not TF32."""
    given = precision if isinstance(precision, tuple) else (precision,)
    return any(p in TRUE_FP32 for p in given)


def _order(call: Facts, partitioned: bool) -> tuple[str, ...]:
    """Return the back ends of the first row of `FASTEST` that matches the call.

    Calls that are not in `FASTEST` avoid "xla", which stores S.
    """
    if call.not_in_cudnn or call.sinks:
        return "mosaic", "triton", "xla"
    if call.head_dim > 128:  # results/kernels/attention_options.json (H100)
        return "cudnn", "triton", "xla"
    fp32 = "fp32" if is_true_fp32(call.precision) else "tf32"
    matmul = "16" if jnp.dtype(call.dtype).itemsize == 2 else fp32
    narrow = call.window is not None and 8 * call.window <= call.length
    return next(
        order
        for capability, of_matmul, head_dim, of_narrow, order in FASTEST
        if capability in (None, _dispatch.capability())
        and of_matmul == matmul
        and head_dim in (None, call.head_dim)
        and of_narrow in (None, narrow)
    )


_dispatch.register(
    "flash_attention",
    back_ends=[
        BackEnd("cudnn", _why_not_cudnn),
        BackEnd("mosaic", _why_not_mosaic, custom=True, rule=True),
        BackEnd("triton", _why_not_triton, custom=True, rule=True),
        XLA,
        REFERENCE,
    ],
    facts=Facts,
    order=_order,
)
