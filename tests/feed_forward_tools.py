"""Inputs, equations in fp64 and checks by the 2× rule for the tests of
`pallas_kernels.feed_forward`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference.torch_gpt2 import assert_within_twice, max_abs, rms
from rule_tools import check, run_reference

from pallas_kernels import _dispatch
from pallas_kernels.feed_forward import linear_gelu, linear_relu_squared, mlp, reference

FUNCTIONS = {"gelu": linear_gelu, "relu_squared": linear_relu_squared}
HIGH, HIGHEST = jax.lax.Precision.HIGH, jax.lax.Precision.HIGHEST


def inputs(lead, i, o, dtype, bias_dtype=None, seed=0):
    """x, w, b: pre-activations have a standard deviation near 1.5, so both tails and the bend of
    GELU are visited."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal((*lead, i)), dtype)
    w = jnp.asarray(rng.standard_normal((i, o)) * 1.4 / i**0.5, dtype)
    b = jnp.asarray(rng.standard_normal(o) * 0.5, bias_dtype or dtype)
    return x, w, b


def selected(dtype, rows, inputs, outputs, implementation="auto"):
    facts = {"dtype": dtype, "rows": rows, "inputs": inputs, "outputs": outputs}
    return _dispatch.select("linear_gelu", implementation, **facts)


def plain(x, w, b, *, activation="gelu", precision=HIGHEST):
    """The textbook in the inputs' own dtype."""
    u = jnp.matmul(x, w, precision=precision) + b.astype(x.dtype).reshape(
        (1,) * (x.ndim - 1) + (-1,)
    )
    return jax.nn.gelu(u, approximate=True) if activation == "gelu" else jnp.square(jax.nn.relu(u))


def check_all(implementation, lead, i, o, dtype, activation="gelu", bias_dtype=None):
    """Output and the three gradients."""
    options = {"precision": "highest"} if implementation == "xla" else {}
    check(
        functools.partial(FUNCTIONS[activation], implementation=implementation, **options),
        functools.partial(plain, activation=activation),
        functools.partial(reference, activation=activation),
        inputs(lead, i, o, dtype, bias_dtype),
        argnums=(0, 1, 2),
        names=("x", "w", "b"),
    )


def exact_passes(product, b, dy, activation):
    """y, du, and its sum over rows in fp64, from the equations."""
    product, b, dy = (np.asarray(a, np.float64) for a in (product, b, dy))
    u = product + b
    if activation == "gelu":
        c = np.sqrt(2 / np.pi)
        t = np.tanh(c * (u + 0.044715 * u**3))
        y = 0.5 * u * (1 + t)
        slope = 0.5 * (1 + t) + 0.5 * u * (1 - t**2) * c * (1 + 3 * 0.044715 * u**2)
    else:
        y, slope = np.maximum(u, 0) ** 2, 2 * np.maximum(u, 0)
    du = dy * slope
    return y, du, du.sum(0)


def exact(x, w, b, dy, activation):
    """y, dx, dw, db in fp64; x is N×I."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    y, du, db = exact_passes(x @ w, b, dy, activation)
    return y, du @ w.T, x.T @ du, db


def exact_mlp(x, w, b, w2, dy):
    """y, dx, dw, db, dw2 in fp64."""
    x, w, b, w2, dy = (np.asarray(a, np.float64) for a in (x, w, b, w2, dy))
    h, *gradients = exact(x, w, b, dy @ w2.T, "gelu")
    return h @ w2, *gradients, h.T @ dy


def check_fp32(f, plain, exact, args, *, norms=(rms, max_abs), seed=1):
    """Output and gradients by the 2× rule. Against fp64: the reference is fp32 itself."""
    dy = jnp.asarray(
        np.random.default_rng(seed).standard_normal(jax.eval_shape(f, *args).shape), jnp.float32
    )

    def with_gradients(f, *args):
        y, pull = jax.vjp(f, *args)
        return y, *pull(dy)

    ours = jax.jit(functools.partial(with_gradients, f))(*args)
    theirs = run_reference(functools.partial(with_gradients, plain), *args)
    names = ("y", "dx", "dw", "db", "dw2")[: 1 + len(args)]
    for name, *arrays in zip(names, ours, theirs, exact(*args, dy), strict=True):
        for norm in norms:
            assert_within_twice(*arrays, norm=norm, name=name)


def check_linear_fp32(implementation, n, i, o, activation, precision, **norms):
    how = {"precision": precision}
    check_fp32(
        functools.partial(FUNCTIONS[activation], implementation=implementation, **how),
        functools.partial(plain, activation=activation, **how),
        functools.partial(exact, activation=activation),
        inputs((n,), i, o, jnp.float32),
        **norms,
    )


def mlp_inputs(n, i, o, c, dtype=jnp.float32):
    x, w, b = inputs((n,), i, o, dtype)
    return x, w, b, jnp.asarray(np.random.default_rng(2).standard_normal((o, c)) / o**0.5, dtype)


def plain_mlp(x, w, b, w2, *, precision=HIGHEST):
    return jnp.matmul(plain(x, w, b, precision=precision), w2, precision=precision)


def check_mlp(implementation, n, i, o, c, dtype):
    """Output and the four gradients."""
    check(
        functools.partial(mlp, implementation=implementation),
        plain_mlp,
        lambda x, w, b, w2: jnp.matmul(
            reference(x, w, b), w2.astype(jnp.float32), precision=HIGHEST
        ),
        mlp_inputs(n, i, o, c, dtype),
        argnums=(0, 1, 2, 3),
        names=("x", "w", "b", "w2"),
    )


def check_mlp_fp32(implementation, n, i, o, c, precision, **norms):
    how = {"precision": precision}
    check_fp32(
        functools.partial(mlp, implementation=implementation, **how),
        functools.partial(plain_mlp, **how),
        exact_mlp,
        mlp_inputs(n, i, o, c),
        **norms,
    )


def loss(x, w, b, implementation="auto"):
    return linear_gelu(x, w, b, implementation=implementation).astype(jnp.float32).sum()
