"""Every public function of pallas_kernels under shard_map's checks, forward mode and second
derivatives, and its dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import h200, unchecked

import pallas_kernels as pk
from pallas_kernels import _calls, _dispatch

ROWS, WHOLE = jax.sharding.PartitionSpec("data"), jax.sharding.PartitionSpec()


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


X, W, B, W2, C = (
    0.5 * normal(0, 4, 8, 16),
    normal(1, 16, 48),
    normal(2, 48),
    normal(3, 48, 16),
    normal(4, 16),
)
SQUARE, Q = normal(5, 4, 8, 8), normal(6, 4, 8, 2, 8)
ANGLES = normal(9, 1, 8, 2), normal(10, 1, 8, 2)
LOGITS, HEAD, TARGETS = normal(7, 32, 12), normal(8, 12, 16), jnp.arange(32) % 11


def norm_of_sum(x, residual, scale, bias, residual_bias, **how):
    return pk.layer_norm(x, scale, bias, residual=residual, residual_bias=residual_bias, **how)[0]


def symmetric_polynomial(a, c, **how):
    return pk.ba_plus_caa(a + a.mT, b=1.5, c=c, d=0.5, **how)


def rotated(qkv, **how):
    q, k, v = pk.rotary_qkv(qkv, *ANGLES, heads=2, key_heads=1, eps=0.1, **how)
    return jnp.concatenate([q, k, v], axis=2)


def head(x, w, targets, **how):
    return pk.linear_cross_entropy(x.reshape(-1, 16), w, targets, vocab_size=11, **how)


# The function, its arrays, which of them a mesh splits along the first axis, and its back ends
# beside reference on any device.
CASES = {
    "softmax": (pk.softmax, (X,), (ROWS,), ["xla"]),
    "layer_norm": (norm_of_sum, (X, 2 * X, C, C, C), (ROWS, ROWS, WHOLE, WHOLE, WHOLE), ["xla"]),
    "rms_norm": (pk.rms_norm, (X, C), (ROWS, WHOLE), ["xla"]),
    "linear": (pk.linear, (X, W, B), (ROWS, WHOLE, WHOLE), ["xla"]),
    "linear_gelu": (pk.linear_gelu, (X, W, B), (ROWS, WHOLE, WHOLE), ["xla"]),
    "linear_relu_squared": (pk.linear_relu_squared, (X, W, B), (ROWS, WHOLE, WHOLE), ["xla"]),
    "mlp": (pk.mlp, (X, W, B, W2), (ROWS, WHOLE, WHOLE, WHOLE), ["xla"]),
    "swiglu": (pk.swiglu, (X, W, 0.3 * W, W2), (ROWS, WHOLE, WHOLE, WHOLE), ["xla"]),
    "rotary_qkv": (rotated, (X,), (ROWS,), ["xla"]),
    "flash_attention": (pk.flash_attention, (Q, 2 * Q, 3 * Q), (ROWS, ROWS, ROWS), ["xla"]),
    "projected_attention": (
        functools.partial(pk.projected_attention, heads=2), (X, W, B), (ROWS, WHOLE, WHOLE), ["xla"]
    ),
    "fused_classifier": (
        lambda x, t, **how: pk.fused_classifier(x, t, **how)[0],
        (LOGITS, TARGETS), (ROWS, ROWS), ["xla"],
    ),
    "linear_cross_entropy": (head, (X, HEAD, TARGETS), (ROWS, WHOLE, ROWS), ["fused", "xla"]),
    "xxt": (pk.xxt, (X,), (ROWS,), ["xla"]),
    "xtx": (pk.xtx, (X,), (ROWS,), ["xla"]),
    "ba_plus_caa": (symmetric_polynomial, (SQUARE, jnp.float32(-0.5)), (ROWS, WHOLE), ["xla"]),
    "transpose_copy": (pk.transpose_copy, (X,), (ROWS,), ["xla"]),
    "transpose_add": (pk.transpose_add, (X.mT, 2 * X), (ROWS, ROWS), ["xla"]),
}  # fmt: skip
BACK_ENDS = [(name, how) for name, (*_, others) in CASES.items() for how in [*others, "reference"]]
ONCE = [
    (name, how)
    for name, how in BACK_ENDS
    if how != "reference" and not name.startswith(("flash", "rotary", "transpose"))
]


def scalar_of(name, implementation):
    """A function with curvature of the floating-point arrays of a case, and those arrays."""
    f, args, _, _ = CASES[name]
    floats = [a for a in args if jnp.issubdtype(a.dtype, jnp.floating)]

    def scalar(*floats):
        out = f(*floats, *args[len(floats) :], implementation=implementation)
        return jnp.sin(out).sum()

    return scalar, floats


def test_no_public_function_is_left_out():
    # Without derivatives: tests/test_decode.py, tests/test_sampling.py and tests/test_fp8.py.
    decoding = {"decode_step", "sample_token", "DecoderCache", "DecoderWeights", "Filters"}
    fp8 = {"quantize", "scaled_matmul"}
    others = {"SigmoidCap", "flash_attention_qkv", "select"}
    assert {*CASES, *decoding, *fp8, *others} == {*pk.__all__}


# ---------------------------------------------------------------------------------------- shard_map


def gradients(f, args, out):
    """Gradients of Σ weights · f(args), with the sum over the devices inside shard_map left to
    JAX."""
    floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
    return jax.grad(lambda *args: (f(*args) * out).sum(), floats)(*args)


def on_two_devices(f, specs, gradient_specs):
    mesh = jax.make_mesh(
        (2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()
    )
    local = functools.partial(gradients, f)
    return jax.jit(
        jax.shard_map(local, mesh=mesh, in_specs=(specs, ROWS), out_specs=gradient_specs)
    )


@pytest.mark.parametrize("name, implementation", BACK_ENDS)
def test_gradients_inside_shard_map(name, implementation):
    """With its default, check_vma=True, those of whole arrays are summed over devices, as JAX's own
    are."""
    f, args, specs, _ = CASES[name]
    f = functools.partial(f, implementation=implementation)
    weights = normal(9, *jax.eval_shape(f, *args).shape)
    expected = jax.jit(functools.partial(gradients, f))(args, weights)
    float_specs = tuple(
        s for s, a in zip(specs, args, strict=True) if jnp.issubdtype(a.dtype, jnp.floating)
    )

    found = on_two_devices(f, specs, float_specs)(args, weights)
    for ours, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=2e-5, atol=2e-5 * float(jnp.abs(whole).max()))


def test_triton_kernels_inside_shard_map(triton_on_cpu):
    """What a kernel writes varies over devices as what it reads does."""
    args, specs = CASES["layer_norm"][1:3]
    found = on_two_devices(functools.partial(norm_of_sum, implementation="triton"), specs, specs)(
        args, X
    )
    expected = jax.jit(
        functools.partial(gradients, functools.partial(norm_of_sum, implementation="xla"))
    )(args, X)
    for ours, whole in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------- empty

EMPTY = {
    "softmax": [(0, 16)],
    "layer_norm": [(0, 16), (0, 16), (16,), (16,), (16,)],
    "rms_norm": [(0, 16), (16,)],
    "linear": [(0, 16), (16, 48), (48,)],
    "linear_gelu": [(0, 64), (64, 128), (128,)],
    "linear_relu_squared": [(0, 64), (64, 128), (128,)],
    "mlp": [(0, 64), (64, 128), (128,), (128, 64)],
    "swiglu": [(0, 64), (64, 128), (64, 128), (128, 64)],
    "rotary_qkv": [(0, 8, 16)],
    "flash_attention": [(0, 8, 2, 64)] * 3,
    "projected_attention": [(0, 8, 16), (16, 384), (384,)],
    "xxt": [(0, 64, 64)],
    "xtx": [(0, 64, 64)],
    "ba_plus_caa": [(0, 64, 64), ()],
    "transpose_copy": [(0, 8, 16)],
    "transpose_add": [(0, 16, 8), (0, 8, 16)],
}


@pytest.mark.parametrize("name", CASES)
def test_an_empty_array_launches_nothing(name, monkeypatch):
    """In any back end, named or not: results and gradients are XLA's."""
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)
    monkeypatch.setattr(_dispatch, "why_not_mosaic", lambda: None)
    monkeypatch.setattr("pallas_kernels._mosaic.num_sms", lambda: 132)
    f = CASES[name][0]
    args = [jnp.ones(shape, jnp.bfloat16) for shape in EMPTY.get(name, [])]
    if name == "fused_classifier":
        args = [jnp.ones((0, 12), jnp.bfloat16), jnp.ones(0, jnp.int32)]
    if name == "linear_cross_entropy":
        args = [jnp.ones((0, 16), jnp.bfloat16), HEAD.astype(jnp.bfloat16), jnp.ones(0, jnp.int32)]
    floats = tuple(i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.floating))
    operation = "flash_attention" if name == "projected_attention" else name
    for implementation in ("auto", *(b.name for b in _dispatch.OPERATIONS[operation].back_ends)):
        if implementation == "cudnn":
            continue
        g = functools.partial(f, implementation=implementation)
        out, pull = jax.vjp(lambda *args, g=g: g(*args), *args)
        assert out.size == 0
        for i, gradient in zip(floats, (pull(out)[i] for i in floats), strict=True):
            assert gradient.shape == args[i].shape and not jnp.asarray(gradient).any()


# ----------------------------------------------------------------- forward mode, second derivatives


@pytest.mark.parametrize("name", CASES)
def test_the_reference_has_forward_mode_and_second_derivatives(name):
    """Forward over reverse against differences of gradients, which `test_*` of each function
    check."""
    scalar, floats = scalar_of(name, "reference")
    direction = [normal(20 + i, *a.shape) for i, a in enumerate(floats)]
    gradient = jax.jit(jax.grad(scalar, tuple(range(len(floats)))))
    slope = jax.jit(lambda *a: jax.jvp(scalar, a, tuple(direction))[1])(*floats)
    np.testing.assert_allclose(
        slope, sum(map(jnp.vdot, gradient(*floats), direction)), rtol=1e-3, atol=1e-3
    )
    moved = lambda step: gradient(*(a + step * d for a, d in zip(floats, direction, strict=True)))
    differences = [
        (after - before) / 2e-3 for after, before in zip(moved(1e-3), moved(-1e-3), strict=True)
    ]
    over_reverse = jax.jit(lambda *a: jax.jvp(gradient, a, tuple(direction))[1])(*floats)
    along = lambda *a: sum(map(jnp.vdot, gradient(*a), direction))
    of_reverse = jax.jit(jax.grad(along, tuple(range(len(floats)))))(*floats)
    for forward, reverse, difference in zip(over_reverse, of_reverse, differences, strict=True):
        size = float(jnp.abs(difference).max())
        np.testing.assert_allclose(forward, reverse, atol=1e-4 * size, rtol=1e-3)
        np.testing.assert_allclose(forward, difference, atol=2e-2 * size)


@pytest.mark.parametrize("name, implementation", ONCE)
def test_forward_mode_of_the_others_says_what_to_do(name, implementation):
    scalar, floats = scalar_of(name, implementation)
    with pytest.raises(TypeError, match=f"{name}: .*forward-mode .*implementation='reference'"):
        jax.jvp(scalar, floats, floats)


def test_second_derivatives_of_the_fused_loss_name_it_and_say_what_to_do():
    """Of the weights, and of what scales the loss: the fused back end reads that as bits, which
    have no derivative."""
    scalar, floats = scalar_of("linear_cross_entropy", "fused")
    with pytest.raises(
        NotImplementedError, match="linear_cross_entropy: .*implementation='reference'"
    ):
        jax.grad(lambda x, w: jnp.vdot(jax.grad(scalar, 1)(x, w), w))(*floats)
    norm = lambda factor, how: jnp.linalg.norm(
        jax.grad(lambda w: factor * head(X, w, TARGETS, implementation=how).mean())(HEAD)
    )
    with pytest.raises(
        NotImplementedError, match="linear_cross_entropy: .*implementation='reference'"
    ):
        jax.grad(norm)(2.0, "fused")
    np.testing.assert_allclose(jax.grad(norm)(2.0, "reference"), norm(1.0, "reference"), rtol=1e-5)


def test_differentiating_a_kernel_names_the_public_function():
    for wrap in (_calls.looped, _calls.batched):
        kernel = wrap("softmax", lambda x, nothing: 2 * x)
        np.testing.assert_array_equal(jax.jit(kernel)(X, None), 2 * X)
        with pytest.raises(NotImplementedError, match="softmax: .*implementation='reference'"):
            jax.jit(jax.grad(lambda x, kernel=kernel: kernel(x, None).sum()))(X)


def test_vmap_of_launches():
    """`looped` calls each element, `batched` all at once, but for a mapped argument that is
    shared."""
    shapes = []

    def kernel(x_BC, scale, *, add=0.0):
        shapes.append(x_BC.shape)
        return {"out": x_BC * scale + add, "sums": x_BC.sum(1)}

    x, scale = normal(30, 5, 3, 4), normal(31, 5)
    for wrap, f, in_axes, shape in [
        (_calls.looped, kernel, (0, None), (3, 4)),
        (functools.partial(_calls.batched, shared=1), kernel, (0, None), (15, 4)),
        (functools.partial(_calls.batched, shared=1), kernel, (None, 0), (3, 4)),
        (functools.partial(_calls.batched, shared=1), kernel, (0, 0), (3, 4)),
    ]:
        arrays = [a if axis == 0 else a[0] for a, axis in zip((x, scale), in_axes, strict=True)]
        shapes.clear()
        out = jax.vmap(wrap("softmax", f), in_axes)(*arrays)
        assert shapes[-1] == shape and {*shapes} <= {(3, 4), shape}
        expected = jax.vmap(kernel, in_axes)(*arrays)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), out, expected)


# ------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float8_e4m3fn, jnp.int32], ids=str)
@pytest.mark.parametrize("name, implementation", BACK_ENDS)
def test_other_dtypes_are_refused(name, implementation, dtype):
    """In every back end: none computes in float64, and none says so with another dtype in its
    result."""
    args = CASES[name][1]
    f = {
        "layer_norm": pk.layer_norm,
        "ba_plus_caa": pk.ba_plus_caa,
        "fused_classifier": pk.fused_classifier,
    }.get(name)
    f = f or getattr(pk, name)
    how = {"projected_attention": {"heads": 2}, "ba_plus_caa": {"b": 1.0, "c": 1.0}}
    how = (how | {"rotary_qkv": {"heads": 2, "key_heads": 1}}).get(name, {})
    args = {
        "layer_norm": (X, C, C),
        "ba_plus_caa": (SQUARE,),
        "linear_cross_entropy": (X[0], HEAD, TARGETS[:8]),
        "rotary_qkv": (X, *ANGLES),
    }.get(name, args)
    with jax.enable_x64(True):
        args = [a.astype(dtype) if jnp.issubdtype(a.dtype, jnp.floating) else a for a in args]
        with pytest.raises(
            ValueError, match=f"{name}: expected .*float32, bfloat16 or float16.*{jnp.dtype(dtype)}"
        ):
            unchecked(f)(*args, implementation=implementation, **how)


INTEGERS = [jnp.uint8, jnp.int8, jnp.uint16, jnp.int16, jnp.uint32, jnp.int64, jnp.uint64]


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("implementation", ["xla", "reference", "fused"])
def test_targets_of_any_integer_type(implementation, dtype):
    with jax.enable_x64(True):
        targets = TARGETS.astype(dtype)
        expected = head(X, HEAD, TARGETS, implementation="xla")
        np.testing.assert_allclose(
            head(X, HEAD, targets, implementation=implementation), expected, rtol=1e-5
        )
        if implementation != "fused":
            found = pk.fused_classifier(
                LOGITS, targets, vocab_size=11, implementation=implementation
            )
            expected = pk.fused_classifier(LOGITS, TARGETS, vocab_size=11, implementation="xla")
            jax.tree.map(
                functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, expected
            )


@pytest.mark.parametrize(
    "dtype, target",
    [
        (jnp.uint32, 2**31),
        (jnp.uint32, 2**32 - 100),
        (jnp.int64, 2**32 + 3),
        (jnp.int64, -(2**32)),
        (jnp.uint64, 2**40),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "reference", "fused"])
def test_a_target_beyond_int32_does_not_wrap(implementation, dtype, target):
    """Neither to a column nor to ignore_index: its loss is NaN, and no other row's."""
    with jax.enable_x64(True):
        targets = TARGETS.astype(dtype).at[3].set(target)
        losses = head(X, HEAD, targets, implementation=implementation, ignore_index=-100)
        np.testing.assert_array_equal(np.flatnonzero(np.isnan(losses)), [3])


MOSAIC = [
    name
    for name, operation in _dispatch.OPERATIONS.items()
    if operation.examples and "mosaic" in [back_end.name for back_end in operation.back_ends]
]


@pytest.mark.parametrize("name", MOSAIC)
def test_mosaic_kernels_can_be_traced_with_x64(name):
    """Forward and backward: with x64, JAX's Python integers are int64."""
    with jax.enable_x64(True), h200():
        for make in _dispatch.OPERATIONS[name].examples:
            if (example := make(2048, jnp.bfloat16)) is None:
                continue
            call = functools.partial(example.call, implementation="mosaic")
            loss = lambda *args, call=call: sum(
                leaf.astype(jnp.float32).sum() for leaf in jax.tree.leaves(call(*args))
            )
            jax.jit(jax.grad(loss) if example.differentiable else call).trace(*example.shapes)


def test_targets_that_are_no_integers_are_refused():
    for targets in (TARGETS.astype(jnp.float32), TARGETS > 3):
        with pytest.raises(
            ValueError, match=f"linear_cross_entropy: expected integer targets, got {targets.dtype}"
        ):
            unchecked(pk.linear_cross_entropy)(X.reshape(-1, 16), HEAD, targets)
        with pytest.raises(
            ValueError, match=f"fused_classifier: expected integer targets, got {targets.dtype}"
        ):
            unchecked(pk.fused_classifier)(LOGITS, targets)
