"""Language-model head and its loss.

    logits = x Wᵀ      z = logits or their soft cap      loss_n = logsumexp(z_n) − z_n[target_n]

or, with M targets per token, loss_n = Σ_m w_m (logsumexp(z_n) − z_n[target_nm]).

Shapes: N tokens, C channels, V rows of the head (padding included), K tokens of a chunk, M targets
per token. The softmax covers the first `vocab_size` columns; padded columns get a gradient of
exactly zero, so padded rows of W never move. A head stored as (C, V) is passed as `w_CV.T`.
classifier/__init__.py has the equation with label smoothing, z-loss and weights of rows.

Back ends:
    fused: the forward pass computes the logits of one chunk of tokens, overwrites the logits with
        dlogits (`fused_classifier`), and adds the chunk's part of both gradients. The forward pass
        runs three matmuls in total, and at most one chunk of logits is alive. The backward pass
        multiplies both gradients by the cotangent g of the losses. For dx the result is exact: each
        row belongs to one token. For dW = Σ_n g_n dlogits_n x_nᵀ the result is exact if all g_n are
        equal, as for a mean or a sum. If the g_n differ, the backward pass recomputes dW from the
        logits, chunk by chunk. At compile time, XLA detects that the g_n of a mean are equal, and
        removes that branch. If all tokens are one chunk, in fp32 or bf16, the backward pass runs
        the matmuls of both gradients, with g x in place of x: multiplying dW would be one more
        pass over dW. If the compiler shards the tokens under `jax.jit`, each device processes its
        rows in chunks, and one all-reduce sums dW. If it shards W over the vocabulary, each device
        computes the logits of its columns: two all-reduces of each chunk combine the softmax
        (`classifier`), one sums dx, and dW stays sharded.
    xla: plain JAX. All logits at once, or `chunk` tokens at a time, recomputed in the backward
        pass.
    reference: as in pallas_kernels/__init__.py.
fused is differentiable once, in reverse mode.

With numerics="fp8", the three matmuls of "fused" are in FP8 where the call is differentiated. The
classifier stores dlogits in e5m2, and a separate pass transposes dlogits. A call that is not
differentiated, such as a call in evaluation, computes in x's dtype. A backward pass that recomputes
dW computes dW in x's dtype.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from pallas_kernels import _arguments, _calls, _dispatch
from pallas_kernels._dispatch import BackEnd
from pallas_kernels._partition import Rule, automatic, sharded, shards_of
from pallas_kernels._types import Array, Float, Integer
from pallas_kernels.classifier import (
    Loss,
    SigmoidCap,
    checked,
    classify,
    constant,
    known,
    log_sum_exp,
)
from pallas_kernels.classifier import reference as classifier_reference
from pallas_kernels.gemm.numerics import HEAD, Numerics, NumericsFacts, numerics_of
from pallas_kernels.gemm.operands import Operand, check_dtypes

# Default number of tokens in a chunk. On an H200 the head's matmul reaches 780 TFLOP/s in chunks of
# 16,384 rows, and 640–700 with 65,536 rows at once.
CHUNK = 16384
Implementation = Literal["auto", "fused", "xla", "reference"]


def _order(call: NumericsFacts, partitioned: bool) -> tuple[str, ...]:
    """Return the back ends, fastest first.

    "fused" is first if its classifier is a custom kernel, and runs on each device's rows: not if
    only some axes of the mesh are manual (`_partition.sharded`), where chunks would be moved
    between devices.
    """
    if call.numerics.quantized:
        return ("fused",)
    partly_manual = partitioned and jax.sharding.get_abstract_mesh().manual_axes
    if partly_manual or _dispatch.why_not_triton() is not None:
        return ("xla",)
    return ("fused", "xla")


_dispatch.register(
    "linear_cross_entropy",
    back_ends=[
        BackEnd("fused", NumericsFacts.why_not),
        BackEnd("xla", NumericsFacts.why_not_reference),
        BackEnd("reference", NumericsFacts.why_not_reference),
    ],
    facts=NumericsFacts,
    order=_order,
)


@_arguments.with_hints(
    {
        "reduction": "the result has the loss of each token; reduce it, such as .mean()",
        "bias": "the head has no bias",
        "logit_softcap": "the option is named softcap",
    }
)
def linear_cross_entropy(
    x_NC: Float[Array, "N C"],
    w_VC: Float[Array, "V C"],
    targets_N: Integer[Array, " N"] | Integer[Array, "N M"],
    *,
    vocab_size: int | None = None,
    chunk: int | None = None,
    softcap: float | int | SigmoidCap | None = None,
    target_weights: Float[Array, " M"] | Sequence[float | int] | None = None,
    ignore_index: int | None = None,
    label_smoothing: float | int = 0.0,
    z_loss: float | int = 0.0,
    weights_N: Float[Array, " N"] | None = None,
    return_lse: bool = False,
    numerics: str | Numerics | None = None,
    implementation: Implementation | str = "auto",
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, " N"] | tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Cross-entropy of each token in nats, in fp32 for every dtype of the inputs.

    Args:
        x_NC: hidden states in fp32, bf16 or fp16; the logits have x's dtype, the softmax is fp32.
        w_VC: head weights of x's dtype, or fp32, which is rounded to x's dtype. The gradient has
            the dtype of the weights; "fused" sums the gradient in fp32.
        targets_N: target column of each row, in [0, vocab_size), in any integer type; or M target
            columns of each row. Out of this range the loss is NaN.
        vocab_size: real columns; V when None.
        chunk: largest number of rows of logits that are alive at once; must divide N. None: about
            16,384 rows in "fused", all rows in the other back ends.
        softcap, target_weights, label_smoothing, z_loss, weights_N: as in `fused_classifier`.
        ignore_index: int32; targets with this value do not contribute. A token whose targets are
            all ignored has loss 0 and gradient 0.
        return_lse: whether to return (losses_N, lse_N), with lse_N as in `fused_classifier`. In
            "fused" and "xla", the derivative of lse_N computes the logits again; that of `z_loss`
            does not.
        numerics: "fp32", "tf32", "bf16", "fp8", or a `pallas_kernels.gemm.Numerics`. None: follows
            the dtypes and `precision`. "fp8": FP8 matmuls where the call is differentiated, with
            the scales `pallas_kernels.gemm.HEAD`, with "auto" or "fused".
        implementation: "auto", or a back end: "fused", "xla", "reference". Forward mode needs
            "reference"; second derivatives need "reference" or "xla".
        precision: precision of fp32 matmuls (JAX's default for fp32 on a GPU is TF32).

    Raises:
        ValueError: wrong shapes, dtypes or numerics, N is not a multiple of `chunk`, or the named
            back end cannot run this call.
        NotImplementedError: differentiation with respect to target_weights or weights_N.
    """
    numerics = numerics_of("linear_cross_entropy", numerics, precision, HEAD)
    arrays = x_NC, w_VC, targets_N
    backend = _dispatch.select(
        "linear_cross_entropy", implementation, arrays=arrays, numerics=numerics
    )
    two_axes = x_NC.ndim == w_VC.ndim == 2
    n, v = x_NC.shape[0], w_VC.shape[0]
    vocab_size = v if vocab_size is None else vocab_size
    same_sizes = two_axes and x_NC.shape[1] == w_VC.shape[1] and targets_N.shape[:1] == (n,)
    if not same_sizes or not 0 < vocab_size <= v:
        raise ValueError(
            "linear_cross_entropy: expected x (N, C), w (V, C), targets (N,) or (N, M), and "
            f"vocab_size ≤ V, got {x_NC.shape}, {w_VC.shape}, {targets_N.shape}, {vocab_size}"
        )
    check_dtypes("linear_cross_entropy", x_NC, "w", w_VC)
    if chunk is not None and (chunk < 1 or n % chunk):
        raise ValueError(f"linear_cross_entropy: {n} tokens are not a multiple of chunk={chunk}")
    loss = Loss(vocab_size, softcap, ignore_index, label_smoothing, z_loss, return_lse)
    weights = target_weights, weights_N
    loss, labels, weights_M = checked("linear_cross_entropy", loss, targets_N, *weights)
    targets, weights_N = labels
    if backend == "reference":
        weights = {"target_weights": weights_M, "weights_N": weights_N}
        return reference(x_NC, w_VC, targets, **weights, **vars(loss))
    weights_N, weights_M = constant("linear_cross_entropy", (weights_N, weights_M))
    arrays = (x_NC, w_VC, (targets, weights_N), weights_M)
    if backend == "xla":
        f, chunk = _in_xla, chunk or n
    else:
        f, chunk = _fused, chunk or _even(n)
        # In fp16, g x may underflow.
        one = chunk == n and not _dispatch.partitioned(arrays)
        if one and not numerics.quantized and x_NC.dtype != jnp.float16:
            f = _in_one_chunk
    options = Options(chunk, numerics, loss)
    call = functools.partial(numerics.call, "linear_cross_entropy", f, options)
    losses_N, lse_N = (automatic(call, x_NC) if numerics.quantized else call)(*arrays)
    if not return_lse:
        return losses_N
    if backend == "fused":
        how = known, functools.partial(_lse_backward, options), lse_N, *arrays
        lse_N = _calls.differentiable("linear_cross_entropy", *how)
    return losses_N, lse_N


def reference(x_NC, w_VC, targets_N, **options):
    """Compute the definition in fp32 with true fp32 matmuls. Return losses_N in fp32, and with
    `return_lse` also lse_N.

    Args:
        options: those of the classifier's `reference`.
    """
    x_NC, w_VC = x_NC.astype(jnp.float32), w_VC.astype(jnp.float32)
    logits_NV = jnp.einsum("nc,vc->nv", x_NC, w_VC, precision=jax.lax.Precision.HIGHEST)
    losses_N, _, *lse = classifier_reference(logits_NV, targets_N, **options)
    return (losses_N, *lse) if lse else losses_N


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of a call."""

    chunk: int
    numerics: Numerics
    loss: Loss

    def gradients(self, w: Operand, weights_M, x_KC, labels):
        """Return losses_K, lse_K and dx_KC, and the chunk's part of dW_VC in fp32."""
        numerics, x = self.numerics, self.numerics.input(x_KC, None)
        logits_KV, scale = numerics.matmul(x, w, x_KC.dtype), numerics.gradient_scale
        losses_K, dlogits_KV, lse_K = classify(self.loss, logits_KV, labels, weights_M, scale=scale)
        dlogits = numerics.output_gradient(dlogits_KV)
        dx_KC = numerics.input_gradient(dlogits, w, x_KC.dtype)
        return (losses_K, lse_K, dx_KC), self.dw(dlogits, x)

    def on_shards(self, f, results: str, x_NC, w_VC, labels, weights_M, *rows):
        """Return f(options, x_NC, w_VC, labels, weights_M, *rows) on each device's rows. A result
        without rows is the sum over the devices.

        The compiler shards calls under `jax.vmap`, which a rule does not support, and FP8 calls,
        whose operands are counted outside of f (`gemm.clipping`).
        """
        f = functools.partial(f, self)
        if self.numerics.quantized:
            return f(x_NC, w_VC, labels, weights_M, *rows)
        targets = "n m" if labels[0].ndim == 2 else "n"
        axes = f"n c, v c, {targets}, n, m{', n' * len(rows)} -> {results}"
        rule = Rule(axes, over="n v", reduced="v")
        on_shards = jax.custom_batching.custom_vmap(sharded(f, rule))

        @on_shards.def_vmap
        def _batched(size, is_batched, *args):
            axes = jax.tree.map(lambda mapped: 0 if mapped else None, is_batched)
            out = jax.vmap(f, tuple(axes))(*args)
            return out, jax.tree.map(lambda _: True, out)

        return on_shards(x_NC, w_VC, labels, weights_M, *rows)

    def dw(self, dlogits: Operand, x: Operand):
        """Return dlogitsᵀ x in fp32; in TF32 without copies of operands."""
        return self.numerics.matmul(dlogits.T, x, jnp.float32)

    def logits(self, x_KC, w_VC):
        """Return the logits in x's dtype."""
        return self.numerics.plain.matmul(Operand(x_KC), Operand(w_VC).T, x_KC.dtype)

    def classified(self, x_KC, w_VC, labels, weights_M, implementation="auto"):
        """Return losses_K, dlogits_KV and lse_K."""
        how = {"implementation": implementation}
        return classify(self.loss, self.logits(x_KC, w_VC), labels, weights_M, **how)

    def over_chunks(self, f, x_NC, *others):
        """Return the first results of f for each chunk, concatenated, and the sum of the second."""
        rows, total = [], None
        for start in range(0, len(x_NC), self.chunk):
            part = operator.itemgetter(slice(start, start + self.chunk))
            x_KC, *of_chunk = jax.tree.map(part, (x_NC, *others))
            # Without this dependency, the compiler may compute the logits of all chunks first, and
            # keep all logits alive.
            x_KC, (rows, total) = jax.lax.optimization_barrier((x_KC, (rows, total)))
            more_rows, more = f(x_KC, *of_chunk)
            rows = [*rows, more_rows]
            total = jax.tree.map(operator.add, total, more) if start else more
        return jax.tree.map(lambda *parts: jnp.concatenate(parts), *rows), total


def _even(n: int) -> int:
    """Return the rows of a chunk: n split into equal parts of at most `CHUNK` rows, a multiple of
    128 where there are several."""
    parts = -(-n // CHUNK)
    return n if parts == 1 else -(-n // (parts * 128)) * 128


def _in_xla(options, x_NC, w_VC, labels, weights_M):
    def losses(x_KC, labels):
        return options.classified(x_KC, w_VC, labels, weights_M, "xla")[::2]

    n, k = x_NC.shape[0], options.chunk
    if n == k:
        return losses(x_NC, labels)
    chunks = jax.tree.map(lambda a: a.reshape(n // k, k, *a.shape[1:]), (x_NC, labels))
    rows = jax.lax.map(jax.checkpoint(lambda args: losses(*args)), chunks)
    return jax.tree.map(lambda a: a.reshape(n), rows)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fused(options, x_NC, w_VC, labels, weights_M):
    return options.on_shards(_losses, "n, n", x_NC, w_VC, labels, weights_M)


def _losses(options, x_NC, w_VC, labels, weights_M):
    w_VC = w_VC.astype(x_NC.dtype)

    def losses(x_KC, labels):
        return options.classified(x_KC, w_VC, labels, weights_M)[::2], None

    return options.over_chunks(losses, x_NC, labels)[0]


def _once(x):
    # Not one call for x and w: a loop over x then computes the operand of w before the loop.
    return _calls.once("linear_cross_entropy", x)


def _fused_forward(options, x_NC, w_VC, labels, weights_M):
    x_NC, w_VC = map(_once, (x_NC, w_VC))
    arrays = x_NC, w_VC, labels, weights_M
    results = options.on_shards(_gradients, "n, n, n c, v c", *arrays)
    losses_N, lse_N, dx_NC, dw_VC = _calls.saved("linear_cross_entropy", results)
    return (losses_N, lse_N), (dx_NC, dw_VC, *arrays)


def _gradients(options, x_NC, w_VC, labels, weights_M):
    head = options.numerics.head(w_VC, x_NC.dtype)
    gradients = functools.partial(options.gradients, head, weights_M)
    (losses_N, lse_N, dx_NC), dw_VC = options.over_chunks(gradients, x_NC, labels)
    return losses_N, lse_N, shards_of("v").sum(dx_NC), dw_VC


def _scaled(x_KC, g_K):
    """Return g x in x's dtype."""
    return (x_KC.astype(jnp.float32) * g_K[:, None]).astype(x_KC.dtype)


def _fused_backward(options, saved, cotangents):
    dx_NC, dw_VC, *arrays = saved
    w_VC, labels = arrays[1:3]
    g_N, _ = cotangents  # `known` differentiates lse
    # `bits_N` below has no derivative.
    g_N = _once(g_N.astype(jnp.float32))
    dx_NC = _scaled(dx_NC, g_N)
    # Compare integers, because NaN ≠ NaN. The cotangent of a mean is one number broadcast, so XLA
    # detects at compile time that all g_n are equal, and removes the branch below.
    bits_N = jax.lax.bitcast_convert_type(g_N, jnp.uint32)
    first, alike = bits_N[0], (bits_N == bits_N[0]).all()
    if options.loss.ignore_index is not None:
        # Skip the cotangents of ignored tokens: these cotangents may differ from the others, such
        # as 0 for a masked mean, and do not contribute.
        counts_N = (labels[0] != options.loss.ignore_index).reshape(len(g_N), -1).any(-1)
        first = jnp.where(alike, first, jnp.where(counts_N, bits_N, 0).max())
        alike |= ((bits_N == first) | ~counts_N).all()

    dw_VC = jax.lax.cond(
        alike,
        lambda: dw_VC * jax.lax.bitcast_convert_type(first, jnp.float32),
        lambda: options.on_shards(_dw, "v c", *arrays, g_N),
    )
    return dx_NC, dw_VC.astype(w_VC.dtype), None, None


def _dw(options, x_NC, w_VC, labels, weights_M, g_N):
    """Return Σ_n g_n dlogits_n x_nᵀ in fp32."""

    def of_chunk(x_KC, labels, g_K):
        dlogits_KV = options.classified(x_KC, w_VC, labels, weights_M)[1]
        g_x, plain = Operand(_scaled(x_KC, g_K)), options.numerics.plain
        return None, plain.matmul(Operand(dlogits_KV).T, g_x, jnp.float32)

    return options.over_chunks(of_chunk, x_NC, labels, g_N)[1]


_fused.defvjp(_fused_forward, _fused_backward)


def _lse_backward(options, x_NC, w_VC, *args):
    dx_NC, dw_VC = options.on_shards(_lse_gradients, "n c, v c", x_NC, w_VC, *args)
    return dx_NC, dw_VC.astype(w_VC.dtype), None, None


def _lse_gradients(options, x_NC, w_VC, labels, weights_M, g_N):
    """Return the gradients of Σ_n g_n lse_n, that of w in fp32."""

    def of_chunk(x_KC, g_K):
        def lse(x_KC, w_VC):
            return log_sum_exp(options.loss, options.logits(x_KC, w_VC))

        dx_KC, dw_VC = jax.vjp(lse, x_KC, w_VC)[1](g_K)
        return dx_KC, dw_VC.astype(jnp.float32)

    dx_NC, dw_VC = options.over_chunks(of_chunk, x_NC, g_N)
    return shards_of("v").sum(dx_NC), dw_VC


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_one_chunk(options, x_NC, w_VC, labels, weights_M):
    return _in_one_chunk_forward(options, x_NC, w_VC, labels, weights_M)[0]


def _in_one_chunk_forward(options, x_NC, w_VC, labels, weights_M):
    x_NC, w_VC = map(_once, (x_NC, w_VC))
    results = options.classified(x_NC, w_VC, labels, weights_M)
    losses_N, dlogits_NV, lse_N = _calls.saved("linear_cross_entropy", results)
    return (losses_N, lse_N), (dlogits_NV, x_NC, w_VC)


def _in_one_chunk_backward(options, saved, cotangents):
    dlogits_NV, x_NC, w_VC = saved
    g_N = _once(cotangents[0].astype(jnp.float32))
    w, dlogits = options.numerics.head(w_VC, x_NC.dtype), Operand(dlogits_NV)
    dx_NC = _scaled(options.numerics.input_gradient(dlogits, w, x_NC.dtype), g_N)
    dw_VC = options.dw(dlogits, Operand(_scaled(x_NC, g_N)))
    return dx_NC, dw_VC.astype(w_VC.dtype), None, None


_in_one_chunk.defvjp(_in_one_chunk_forward, _in_one_chunk_backward)


# ----------------------------------------------------------------------------------------- examples


@_dispatch.example("linear_cross_entropy")
def _example(rows, dtype):
    """Rows of GPT-2's width and a small padded vocabulary: the loop over chunks of logits."""
    targets_N = jnp.arange(rows, dtype=jnp.int32) % 1000
    arrays = (jax.ShapeDtypeStruct((rows, 768), dtype), jax.ShapeDtypeStruct((1024, 768), dtype))

    def losses(f):
        return lambda x_NC, w_VC, **how: f(x_NC, w_VC * 0.04, targets_N, vocab_size=1000, **how)

    return _dispatch.Example(losses(linear_cross_entropy), losses(reference), arrays)
