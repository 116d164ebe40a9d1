"""Error of du and of the gradients of GPT-2's MLP, by the dtype in which the derivative of GELU is
saved.

    python benchmarks/experiments/fp8_derivative.py

Relative RMS errors against the same gradients in fp32 of operands that are not rounded, of the back
end xla. Runs on any device.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from gptjax.bench.table import Row, print_table
from pallas_kernels import mlp
from pallas_kernels.fp8 import E4M3, layers, own_scale
from pallas_kernels.fp8.layers import activations, quantized_gradient, quantized_weights

N, C, F = 2048, 256, 1024
NAMES = ("du", "dx", "dw", "db", "dw2")


def operands() -> list[jax.Array]:
    """Return x, w, b, w2 and dy. u has a standard deviation of 1.1."""
    rng = np.random.default_rng(0)
    shapes = {"x": (N, C), "w": (C, F), "b": (F,), "w2": (F, C), "dy": (N, C)}
    scales = {"x": 1, "w": C**-0.5, "b": 0.5, "w2": F**-0.5, "dy": 1e-5}
    return [
        jnp.asarray(rng.standard_normal(shape) * scales[name], jnp.float32)
        for name, shape in shapes.items()
    ]


def error(found, exact) -> float:
    found, exact = (np.asarray(a, np.float64) for a in (found, exact))
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def gradient_of_u(x, w, b, w2, dy):
    """Return du as `layers.mlp` computes it, in fp32."""
    options = layers.Options("gelu", "xla", False)
    w8, w28, (dy8, scale) = quantized_weights(w), quantized_weights(w2), quantized_gradient(dy)
    how = w8.scale.over_factor, jnp.float32
    *_, saved = layers._activated(options, activations(x).rows, w8.oi, b, *how)
    factors = (dy8.scale.inverse, w28.scale.inverse)
    du, *_ = layers._activated_backward(
        options, dy8.rows, w28.io, saved, factors, scale, jnp.float32, True
    )
    return du.astype(jnp.float32) / scale


def gradients(fp8: bool, x, w, b, w2, dy) -> dict[str, jax.Array]:
    f = functools.partial(mlp, fp8=fp8, implementation="xla" if fp8 else "reference")
    return dict(zip(NAMES[1:], jax.vjp(f, x, w, b, w2)[1](dy), strict=True))


def exact_gradients(x, w, b, w2, dy) -> dict[str, jax.Array]:
    slope = jax.vmap(jax.vmap(jax.grad(functools.partial(jax.nn.gelu, approximate=True))))
    precise = functools.partial(jnp.matmul, precision="highest")
    du = precise(dy, w2.T) * slope(precise(x, w) + b[None])
    return {"du": du} | gradients(False, x, w, b, w2, dy)


def main() -> None:
    own_scale.IN_KERNELS = False
    args, rows = operands(), []
    exact = exact_gradients(*args)
    for name, dtype in (("bf16", jnp.bfloat16), ("e4m3", E4M3)):
        layers.ACTIVATIONS["gelu"] = dataclasses.replace(layers.GELU, derivative_dtype=dtype)
        found = {"du": gradient_of_u(*args)} | gradients(True, *args)
        rows.append(Row(name, tuple(f"{error(found[n], exact[n]):.4f}" for n in NAMES)))
    print_table("relative RMS error", NAMES, rows)


if __name__ == "__main__":
    main()
