"""Numerics: how arrays become operands of matmuls, and how two operands are multiplied.

With operands X (N, I), W (I, O) and dY (N, O) of a linear layer, each rule of this package is
written once for every precision:

    y = mm(X.rows, W.k_major)      dx = mm(dY.rows, W.rows)      dw = mm(X.k_major, dY.k_major)

where mm(a, b) = a bᵀ sums over the last axis of both. `Plain` computes in the dtype of the arrays,
and copies operands to K-major layout in TF32 only. `Fp8` converts the operands to FP8, in both
layouts, in a call that is differentiated.

In TF32, Hopper's tensor cores need both operands K-major (contiguous along the axis of the sum).
cuBLAS's kernels for other layouts reach half the rate (H200: xᵀ dy of 32768×768 and 32768×3072 at
193 TFLOP/s, x wᵀ at 413). A copy, or the kernel that computes the operand, stores the transpose.
bf16 matmuls support any layout. FP8 matmuls support K-major operands only.

Scales of `Fp8`:

| operand | scale |
| --- | --- |
| x, gelu(u) | `activation_scale`: numbers beyond 56 become 56 |
| relu(u)², silu(g)·u | 1: numbers beyond 448 become 448 |
| gelu'(u) | 256, not an operand |
| w | from the largest |w|, at each call |
| dy | from the largest |dy| of a sixteenth of the columns, at each call, with `headroom` |
| du | the scale of dy |

No scale depends on earlier steps: there is no state.
"""

import abc
import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import _calls, _dispatch
from pallas_kernels.gemm import clipping
from pallas_kernels.gemm.operands import (
    E4M3,
    E5M2,
    Operand,
    Scale,
    as_row,
    quantize,
    quantize_by_largest,
    sample,
    scale_for,
    transposed,
    why_not_fp8,
)
from pallas_kernels.gemm.sums import sum_rows
from pallas_kernels.gemm.xla import scaled_matmul
from pallas_kernels.transpose import transpose_copy, transpose_sum_rows


@dataclasses.dataclass(frozen=True)
class HiddenFormat:
    """How the hidden layer y = a(u) of an MLP and its gradient are stored.

    Attributes:
        dtype, scale: dtype of y, and its factor.
        saved_dtype, saved_scale: of the derivative a'(u), which the backward pass reads. A dtype of
            None: the backward pass reads y; the derivative is 2·√y.
        gradient_dtype: dtype of du.
        k_major: whether y and du are stored in both layouts.
        transposes: whether a kernel of the backward pass recomputes y, and stores yᵀ and duᵀ.
    """

    dtype: jax.typing.DTypeLike
    scale: float
    saved_dtype: jax.typing.DTypeLike | None
    saved_scale: float
    gradient_dtype: jax.typing.DTypeLike
    k_major: bool = False
    transposes: bool = False

    def derivative(self, saved):
        """Return the derivative times `derivative_scale`, from the saved array in fp32."""
        return jnp.sqrt(saved) if self.saved_dtype is None else saved

    @property
    def derivative_scale(self) -> float:
        return self.scale**0.5 / 2 if self.saved_dtype is None else self.saved_scale


class Numerics(abc.ABC):
    """How an activation, a weight and a gradient become operands, and how operands are multiplied.

    A precision is a subclass with `activation`, `weight`, `gradient` and `matmul`. Instances are
    static arguments of compiled functions: frozen dataclasses.
    """

    name = "custom"
    gradient_scale: float | None = None
    """Constant scale of the gradient of logits, if `gradient` receives it in e5m2."""

    @property
    def plain(self) -> "Plain":
        """Numerics of a call that is not differentiated."""
        return Plain()

    @property
    def quantized(self) -> bool:
        """Whether a call that is differentiated has other operands than one that is not."""
        return self.plain != self

    def why_not(self) -> str | None:
        """Return None if the default device computes these matmuls, else the reason."""
        return None

    def flat(self, x: jax.Array) -> bool:
        """Whether the rows of operands are one axis; else all leading axes of the activation x,
        which the compiler may shard."""
        return True

    @property
    def stored_activation(self) -> tuple[jax.typing.DTypeLike, float] | None:
        """Dtype and factor of the rows that a norm stores for `activation`. None: the norm stores
        an array, and `activation` converts it."""
        return None

    def hidden_format(self, activation: str, dtype: jax.typing.DTypeLike) -> HiddenFormat | None:
        """Return how kernels store a(u) of x in `dtype`. None: there are no kernels, and
        `activation` and `gradient` convert the hidden layer."""
        return None

    def hidden(
        self, activation: str, y: jax.Array, *, rows: bool = True, k_major: bool = True
    ) -> Operand:
        """Return the operand of y = a(u); of an FP8 operand, the copies that are asked for."""
        stored = self.hidden_format(activation, y.dtype)
        if stored is None:
            return self.activation(y)
        if not stored.k_major:
            return Operand(y)
        q = quantize(y, stored.scale, stored.dtype, rows=rows, transposed=k_major)
        return Operand(q.rows, q.transposed, factor=stored.scale)

    def hidden_gradient(self, activation: str, du: jax.Array, dy: Operand | None) -> Operand:
        """Return the operand of du; dy is the operand of the MLP's gradient."""
        stored = self.hidden_format(activation, du.dtype)
        if stored is None:
            return self.gradient(du)
        if not stored.k_major:
            return Operand(du)
        q = quantize(du, dy.scale.value, stored.gradient_dtype, transposed=True)
        return Operand(q.rows, q.transposed, dy.scale)

    def factors(self, a: Operand, b: Operand) -> tuple:
        """Return factors whose product undoes the scales of both operands."""
        return ()

    def kernel_scale(self, like: jax.Array, headroom: float) -> Scale | None:
        """Return the scale of a gradient that a kernel stores in e5m2, from the largest |like| of
        the sampled columns. None: kernels do not store it in FP8."""
        return None

    def input(self, x: jax.Array, converted: Operand | None) -> Operand:
        """Return the operand of a layer's input, which a norm may have converted."""
        return self.count("input", self.activation(x) if converted is None else converted)

    def output_gradient(self, dy: jax.Array) -> Operand:
        """Return the operand of the gradient of a layer's output."""
        return self.count("output_gradient", self.gradient(dy))

    def count(self, part: str, operand: Operand) -> Operand:
        """Count the clipped numbers and the zeros of an operand for `clipping.shares`. Return the
        operand."""
        if self.quantized:
            clipping.count(part, operand.rows)
        return operand

    def call(self, operation: str, f: Callable, *args: Any) -> Any:
        """Call a `jax.custom_vjp` function with these numerics, as `_calls.differentiable`."""
        f = clipping.counted(operation, f) if self.quantized else f
        return _calls.differentiable(operation, f, *args)

    @abc.abstractmethod
    def activation(self, x: jax.Array) -> Operand:
        """Return the operand of an activation (R, C)."""

    @abc.abstractmethod
    def weight(self, w: Any, output_major: bool = False) -> Operand:
        """Return the operand of a weight (I, O), or of one stored as (O, I) if `output_major`. A
        tuple of matrices is one matrix with their columns side by side."""

    def head(self, w_VC: jax.Array, dtype: jax.typing.DTypeLike) -> Operand:
        """Return the operand of the LM head's weight, for several matmuls of x in `dtype`."""
        return self.weight(w_VC, output_major=True)

    @abc.abstractmethod
    def gradient(self, dy: jax.Array) -> Operand:
        """Return the operand of a gradient (N, O)."""

    @abc.abstractmethod
    def matmul(self, a: Operand, b: Operand, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return a b in `dtype`, for a (M, K) and b (K, N): it sums over the columns of a and the
        rows of b."""

    def product(self, x: Operand, w: Operand, dtype, bias_O=None) -> jax.Array:
        """Return x w + bias in `dtype`."""
        y_NO = self.matmul(x, w, dtype)
        return y_NO if bias_O is None else y_NO + as_row(bias_O.astype(y_NO.dtype), y_NO)

    def input_gradient(self, dy: Operand, w: Operand, dtype) -> jax.Array:
        """Return dy wᵀ in `dtype`."""
        return self.matmul(dy, w.T, dtype)

    def weight_gradient(self, x: Operand, dy: Operand, output_major: bool = False) -> jax.Array:
        """Return xᵀ dy in fp32, or its transpose if `output_major`."""
        a, b = (dy, x) if output_major else (x, dy)
        return self.matmul(a.T, b, jnp.float32)

    def gradients(self, x: Operand, w: Operand, dy_NO, *, bias: bool) -> tuple:
        """Return dx in dy's dtype, and dw and db in fp32; db is None without a bias."""
        dy = self.output_gradient(dy_NO)
        dx_NI = self.input_gradient(dy, w, dy_NO.dtype)
        # The types of the gradients that cuDNN's attention returns do not name the mesh of the
        # gradients: `select` also looks at dx.
        db_O = sum_rows(dy_NO, dx_NI) if bias else None
        return dx_NI, self.weight_gradient(x, dy), db_O


@dataclasses.dataclass(frozen=True)
class Plain(Numerics):
    """Matmuls in the dtype of the activations; fp32 in true fp32 or TF32.

    Attributes:
        precision: precision of fp32 matmuls, as JAX's `precision` arguments. HIGHEST: true fp32.
            HIGH: TF32, with operands copied to K-major layout. None: JAX's default, on a GPU TF32.
    """

    precision: jax.lax.PrecisionLike = None

    def __post_init__(self):
        if isinstance(self.precision, str):
            with contextlib.suppress(ValueError):  # the name of an algorithm stays
                object.__setattr__(self, "precision", jax.lax.Precision(self.precision))

    @property
    def name(self) -> str:
        highest = self.precision == jax.lax.Precision.HIGHEST
        return "fp32" if highest else "tf32" if self.tf32 else "dtype of the arrays"

    @property
    def plain(self) -> "Plain":
        return self

    def flat(self, x):
        return self.tf32 or not _dispatch.partitioned(x)

    @property
    def tf32(self) -> bool:
        """Whether operands are copied to K-major layout."""
        return self.precision == jax.lax.Precision.HIGH

    def hidden_format(self, activation, dtype):
        dtype = jnp.dtype(dtype)
        transposes = self.tf32 and dtype == jnp.float32
        return HiddenFormat(dtype, 1.0, dtype, 1.0, dtype, transposes=transposes)

    def activation(self, x):
        return Operand(x)

    def weight(self, w, output_major=False):
        # Matmuls cast the weight: a cast copy would be saved for the backward pass.
        return Operand(w).T if output_major else Operand(w)

    def head(self, w_VC, dtype):
        w = Operand(None, w_VC.astype(dtype))
        # TF32 matmuls on Hopper need both operands K-major; 16-bit matmuls support any order.
        return w if dtype != jnp.float32 else Operand(transpose_copy(w.k_major), w.k_major)

    def gradient(self, dy):
        return Operand(dy)

    def matmul(self, a, b, dtype):
        # The axes of the sum: the last one, or those of the rows, which may be several.
        def over(x, last):
            axes = jax.tree.leaves(x)[0].ndim - 1
            return (axes,) if last else (*range(axes),)

        a_MK = a.k_major if a.rows is None else a.rows
        b_KN = b.rows if b.k_major is None else b.k_major
        sums = over(a_MK, a.rows is not None), over(b_KN, b.k_major is not None)
        narrow = min((x.dtype for x in jax.tree.leaves((a_MK, b_KN))), key=lambda d: d.itemsize)
        how = {"precision": self.precision, "preferred_element_type": dtype}
        axes = (sums, ((), ()))
        return jax.lax.dot_general(joined(a_MK, narrow), joined(b_KN, narrow), axes, **how)

    def product(self, x, w, dtype, bias_O=None):
        """Return x w + bias in `dtype`, rounded once as in PyTorch and llm.c.

        A second rounding loses small biases: in bf16, 0.5 + 0.001 is 0.5. With two roundings, the
        losses of ten steps have 2.7 times PyTorch's error against fp64 (H200).
        """
        narrow = x.rows.dtype
        rows = None if w.rows is None else joined(w.rows, narrow)
        w = Operand(rows, None if w.k_major is None else w.k_major.astype(narrow))
        # For few rows, such as the rows of a sampled token, the copy of w costs more than it saves.
        if self.tf32 and w.k_major is None and x.rows.shape[0] >= x.rows.shape[1]:
            w = Operand(w.rows, transpose_copy(w.rows))
        if bias_O is None:
            return self.matmul(x, w, dtype)

        def add_in(sum_dtype, x, w, bias_O):
            y_NO = self.matmul(x, w, sum_dtype)
            return (y_NO + as_row(bias_O.astype(sum_dtype), y_NO)).astype(dtype)

        # cuBLASLt adds a bf16 bias to the fp32 accumulator of a bf16 matmul. XLA fuses a bf16
        # matmul and a bf16 addition to this epilogue, and stores no fp32 result. The same
        # operations round twice on a CPU, and on a GPU with XLA's default
        # --xla_gpu_enable_triton_gemm. gptjax disables that flag for training.
        cuda, default = (functools.partial(add_in, jnp.dtype(t)) for t in (dtype, jnp.float32))
        return jax.lax.platform_dependent(x, w, bias_O, cuda=cuda, default=default)

    def weight_gradient(self, x, dy, output_major=False):
        if self.tf32:
            x, dy = map(_with_k_major, (x, dy))
        return super().weight_gradient(x, dy, output_major)

    def gradients(self, x, w, dy_NO, *, bias):
        if not (
            bias
            and self.tf32
            and _dispatch.select("transpose_sum_rows", arrays=(x.rows, dy_NO)) == "triton"
        ):
            return super().gradients(x, w, dy_NO, bias=bias)
        # The custom kernel computes the transpose and the sum from one read of dy.
        dx_NI = self.input_gradient(Operand(dy_NO), w, dy_NO.dtype)
        dy_ON, db_O = transpose_sum_rows(dy_NO)
        return dx_NI, self.weight_gradient(x, Operand(dy_NO, dy_ON)), db_O


def _with_k_major(x: Operand) -> Operand:
    return Operand(x.rows, transpose_copy(x.rows)) if x.k_major is None else x


@dataclasses.dataclass(frozen=True)
class Fp8(Numerics):
    """FP8 matmuls where the call is differentiated: e4m3 for activations and weights, e5m2 for
    gradients, each times a scale of the whole array (table at the top of this file).

    Attributes:
        activation_scale: factor of x. With 8, e4m3 represents 0.002 … 56 with a relative error of
            1/16, and 0.0001 … 0.002 with an absolute error of 0.0001. The outputs of norms,
            attention and GELU are near 1.
        headroom: largest supported ratio of max |dy| to the maximum of the sampled columns, and of
            max |du| to max |dy|. The range of e5m2 suffices: 2⁻²⁴ times the sampled maximum is a
            normal number.
        gradient_scale: see `Numerics`.
        rounds_weights: whether weights are rounded to bf16 before they are converted, as strategies
            that shard the parameters gather them.
        fast: number of terms up to which the error of a fast sum, 4e-4 of the result, is far below
            the error of rounding the terms. Longer sums use cuBLASLt's slower accumulation.
        undifferentiated: numerics of a call that is not differentiated.
    """

    activation_scale: float = 8.0
    headroom: float = 64.0
    gradient_scale: float | None = None
    rounds_weights: bool = True
    fast: int = 4096
    undifferentiated: Plain = Plain()
    name = "fp8"

    @property
    def plain(self):
        return self.undifferentiated

    @property
    def stored_activation(self):
        return E4M3, self.activation_scale

    def why_not(self):
        return why_not_fp8()

    def hidden_format(self, activation, dtype):
        if activation == "gelu":  # the derivative is between −0.13 and 1.13
            return HiddenFormat(E4M3, self.activation_scale, E4M3, 256.0, E5M2, k_major=True)
        # Squares and products have a wider range: e4m3 represents 1/64 … 448 with a relative error
        # of 1/16. The derivative of relu(u)² is read from the square.
        return HiddenFormat(E4M3, 1.0, None, 1.0, E5M2, k_major=True)

    def activation(self, x):
        q = quantize(x, self.activation_scale, E4M3, transposed=True)
        return Operand(q.rows, q.transposed, factor=self.activation_scale)

    def weight(self, w, output_major=False):
        w = joined(w, jnp.result_type(*jax.tree.leaves(w)))
        if self.rounds_weights:
            operand = quantize_by_largest(w, E4M3, factor=self.activation_scale)
        else:
            scale = scale_for(jnp.abs(w).max(), E4M3)
            q = quantize(w, scale, E4M3, transposed=True)
            operand = Operand(q.rows, q.transposed, Scale.of(scale, self.activation_scale))
        return operand.T if output_major else operand

    def gradient(self, dy):
        if dy.dtype == E5M2:  # the classifier's gradient of the logits
            return Operand(dy, transposed(dy), factor=self.gradient_scale)
        # All rows, since the rows of ignored targets may be zero. Reading all columns would take a
        # third of the time of the conversion.
        how = {"headroom": self.headroom, "factor": self.activation_scale, "sampled": True}
        return quantize_by_largest(dy, E5M2, **how)

    def kernel_scale(self, like, headroom):
        scale = scale_for(jnp.abs(sample(like)).max(), E5M2, headroom)
        return Scale.of(scale, self.activation_scale)

    def factors(self, a, b):
        # No launch for the scales in use.
        scales = [operand.scale for operand in (a, b) if operand.scale is not None]
        factor = a.factor * b.factor  # an operand with a scale has no factor
        if len(scales) == 1 and factor == self.activation_scale:
            return (scales[0].over_factor,)
        inverses = [scale.inverse for scale in scales]
        return (*inverses, *([] if factor == 1.0 else [1 / factor]))

    def matmul(self, a, b, dtype):
        scale, fast = math.prod(self.factors(a, b)), a.rows.shape[1] <= self.fast
        return scaled_matmul(a.rows, b.k_major, scale, out_dtype=dtype, fast_accumulation=fast)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NumericsFacts:
    """Properties of a call with matmuls on which the choice of a back end depends.

    Attributes:
        numerics: a `Numerics`, or its name.
    """

    numerics: Any = "bf16"

    def __post_init__(self):
        object.__setattr__(self, "numerics", numerics_of("select", self.numerics, None, Fp8()))

    def why_not(self) -> str | None:
        """Return None if the device computes the numerics, else the reason why not."""
        return self.numerics.why_not()

    def why_not_reference(self) -> str | None:
        """Return None if the numerics are those of the dtype, else the reason why not."""
        return f"has no {self.numerics.name} matmuls" if self.numerics.quantized else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpFacts(NumericsFacts):
    """Properties of a call of an MLP on which the choice of a back end depends."""

    dtype: jax.typing.DTypeLike
    rows: int

    def why_not_kernels(self) -> str | None:
        """Return None if there are kernels for the numerics, else the reason why not."""
        if self.numerics.hidden_format("gelu", self.dtype) is None:
            return f"has no kernels for {self.numerics.name} matmuls"
        return self.why_not()


def divides_shards(why_not: Callable, call: MlpFacts, devices: int) -> bool:
    """Return whether a back end supports the rows of a shard, however many of the devices shard
    the rows."""
    shard = dataclasses.replace(call, rows=call.rows // devices)
    return call.rows % devices == 0 and why_not(shard) is None


HEAD = Fp8(activation_scale=4.0, gradient_scale=512.0, rounds_weights=False)
"""FP8 of the LM head: powers of two near the factors of the modded-nanogpt speedrun (x 448/100,
gradient 448/0.75). |dlogits| is at most the sum of the weights times the cap's slope, with z-loss
times 1 + 2 z_loss lse; e5m2 represents 112."""


def numerics_of(
    operation: str,
    numerics: str | Numerics | None,
    precision: jax.lax.PrecisionLike,
    fp8: Fp8 | None = None,
) -> Numerics:
    """Return the numerics of a call from its arguments `numerics` and `precision`.

    Args:
        operation: name of the public function, for errors.
        numerics: "fp32", "tf32", "bf16", "fp8", an object, or None: those of `precision`.
        precision: precision of fp32 matmuls; with FP8, of a call that is not differentiated.
        fp8: what "fp8" means; None: the operation has no FP8 matmuls.

    Raises:
        ValueError: unknown or unsupported numerics, or both arguments name a precision.
    """
    names = {
        "fp32": Plain(jax.lax.Precision.HIGHEST),
        "tf32": Plain(jax.lax.Precision.HIGH),
        "bf16": Plain(),
    } | ({} if fp8 is None else {"fp8": fp8})
    if numerics is None:
        return Plain(precision)
    found = numerics if isinstance(numerics, Numerics) else names.get(numerics)
    if found is None or (fp8 is None and not isinstance(found, Plain)):
        raise ValueError(
            f"{operation}: expected numerics as one of {list(names)}, or a Numerics that this "
            f"operation supports, got {numerics!r}"
        )
    if isinstance(found, Fp8) and precision is not None:
        return dataclasses.replace(found, undifferentiated=Plain(precision))
    if precision is not None and found != Plain(precision):
        raise ValueError(
            f"{operation}: expected numerics or precision, got {numerics!r} and {precision!r}"
        )
    return found


BLOCK = 32
"""Columns of a block of `Interleaved`."""


class Interleaved(NamedTuple):
    """Two matrices whose columns alternate in blocks when they are `joined`."""

    first: jax.Array
    second: jax.Array


def joined(w: Any, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return w in `dtype`: one matrix, or several matrices concatenated along the columns."""
    parts = [part.astype(dtype) for part in jax.tree.leaves(w)]
    if isinstance(w, Interleaved):
        blocks = [part.reshape(len(part), -1, BLOCK) for part in parts]
        return jnp.stack(blocks, axis=2).reshape(len(parts[0]), -1)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=1)


def like(w: Any) -> Any:
    """Return empty arrays with the columns and dtypes of the matrices w, for `split_like`."""
    return jax.tree.map(lambda a: jnp.zeros((0, *a.shape[1:]), a.dtype), w)


def split_like(dw_IO: jax.Array, w: Any) -> Any:
    """Convert the gradient of `joined(w)` to the structure and dtypes of w."""
    parts, structure = jax.tree.flatten(w)
    if isinstance(w, Interleaved):
        blocks = dw_IO.reshape(len(dw_IO), -1, 2, BLOCK)
        pieces = [blocks[:, :, i].reshape(len(dw_IO), -1) for i in range(2)]
        return Interleaved(*(piece.astype(a.dtype) for piece, a in zip(pieces, parts, strict=True)))
    ends = list(itertools.accumulate(part.shape[1] for part in parts))
    pieces = jnp.split(dw_IO, ends[:-1], axis=1)
    gradients = [piece.astype(part.dtype) for piece, part in zip(pieces, parts, strict=True)]
    return jax.tree.unflatten(structure, gradients)
