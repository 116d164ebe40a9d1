"""One call of layer_norm or rms_norm, its equations in fp64, and the check by the 2× rule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from reference.torch_gpt2 import assert_within_twice, max_abs, rms
from rule_tools import run_reference

from pallas_kernels.norm import layer_norm, rms_norm


@dataclasses.dataclass(frozen=True)
class Norm:
    """One way to call layer_norm or rms_norm, of its arrays (x, residual, scale, bias,
    residual_bias) and one or two directions."""

    centred: bool = True
    scaled: bool = True
    residual: bool = True
    residual_bias: bool = False
    eps: float = 1e-5
    out_dtype: jnp.dtype | None = None
    parameters: jnp.dtype | None = jnp.float32
    """None: the dtype of x."""

    def names(self) -> tuple[str, ...]:
        """Of the arguments that this call has; y and total come before their gradients."""
        found = (
            ["x"] + ["residual"] * self.residual + ["scale"] * self.scaled + ["bias"] * self.centred
        )
        return (*found, *["residual_bias"] * self.residual_bias)

    def arrays(self, shape, dtype, seed=0, offset=0.0):
        rng = np.random.default_rng(seed)
        parameters = dtype if self.parameters is None else self.parameters
        made = {
            "x": jnp.asarray(2 * rng.standard_normal(shape) + offset, dtype),
            "residual": jnp.asarray(rng.standard_normal(shape), dtype),
            "scale": jnp.asarray(1 + 0.3 * rng.standard_normal(shape[-1]), parameters),
            "bias": jnp.asarray(rng.standard_normal(shape[-1]), parameters),
        }
        if self.residual_bias:
            made["residual_bias"] = jnp.asarray(rng.standard_normal(shape[-1]), parameters)
        directions = [jnp.asarray(rng.standard_normal(shape), self.out_dtype or dtype)]
        directions += [jnp.asarray(rng.standard_normal(shape), dtype)] * self.residual
        return {name: made[name] for name in self.names()}, tuple(directions)

    def call(self, implementation):
        """A function of the arguments, in the order of `names`, that returns a tuple."""

        def f(*args):
            given = dict(zip(self.names(), args, strict=True))
            x, residual = given["x"], given.get("residual")
            options = {
                "eps": self.eps,
                "out_dtype": self.out_dtype,
                "implementation": implementation,
            }
            if self.centred:
                options["residual_bias"] = given.get("residual_bias")
                found = layer_norm(x, given["scale"], given["bias"], residual=residual, **options)
            else:
                found = rms_norm(x, given.get("scale"), residual=residual, **options)
            return found if self.residual else (found,)

        return f

    def plain(self, *args):
        """The textbook in the inputs' own dtype; the arithmetic of a row is fp32."""
        given = dict(zip(self.names(), args, strict=True))
        total = given["x"] + given["residual"] if self.residual else given["x"]
        if self.residual_bias:
            total = given["x"].astype(jnp.float32) + given["residual"].astype(jnp.float32)
            total = total + jnp.broadcast_to(
                given["residual_bias"].astype(jnp.float32), total.shape
            )
            total = total.astype(given["x"].dtype)
        y = total.astype(jnp.float32)
        if self.centred:
            y = y - y.mean(-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + self.eps)
        if self.scaled:
            y = y * jnp.broadcast_to(given["scale"].astype(jnp.float32), y.shape)
        if self.centred:
            y = y + jnp.broadcast_to(given["bias"].astype(jnp.float32), y.shape)
        y = y.astype(self.out_dtype or total.dtype)
        return (y, total) if self.residual else (y,)

    def exact(self, given, directions):
        """Outputs and gradients in fp64, from the equations."""
        given = {name: np.asarray(a, np.float64) for name, a in given.items()}
        dy, *dtotal = (np.asarray(d, np.float64) for d in directions)
        total = given["x"] + given.get("residual", 0) + given.get("residual_bias", 0)
        centred = total - total.mean(-1, keepdims=True) if self.centred else total
        rstd = 1 / np.sqrt((centred**2).mean(-1, keepdims=True) + self.eps)
        xhat, scale = centred * rstd, given.get("scale", 1)
        g = dy * scale
        dx = g - xhat * (g * xhat).mean(-1, keepdims=True)
        if self.centred:
            dx -= g.mean(-1, keepdims=True)
        dx = dx * rstd + sum(dtotal)
        rows = tuple(range(dy.ndim - 1))
        gradients = {"x": dx, "residual": dx, "scale": (dy * xhat).sum(rows), "bias": dy.sum(rows)}
        gradients["residual_bias"] = dx.sum(rows)
        outputs = (xhat * scale + given.get("bias", 0), total)[: 1 + self.residual]
        return (*outputs, *(gradients[name] for name in self.names()))


def with_gradients(f, args, directions):
    outputs, pull = jax.vjp(f, *args)
    return (*outputs, *pull(directions))


def check(norm, implementation, shape, dtype, norms=(rms, max_abs), **inputs):
    given, directions = norm.arrays(shape, dtype, **inputs)
    args = tuple(given.values())
    found = jax.jit(functools.partial(with_gradients, norm.call(implementation)))(args, directions)
    plain = run_reference(functools.partial(with_gradients, norm.plain), args, directions)
    outputs = ("y", "total")[: 1 + norm.residual]
    names = (*outputs, *(f"gradient of {name}" for name in norm.names()))
    for name, ours, theirs, true in zip(
        names, found, plain, norm.exact(given, directions), strict=True
    ):
        assert ours.dtype == theirs.dtype, name
        for size in norms:
            assert_within_twice(ours, theirs, true, norm=size, name=name)


BIASED = Norm(residual_bias=True)
