"""`jax.checkpoint` policies with the names of operations: a named operation is not computed again.

The launches of Triton kernels in the gradient are counted, in Triton's interpreter.
"""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk

N, C, F, V = 16, 32, 64, 48
QKV = (1, N, 2, 16)
CALLS = {
    "flash_attention": (pk.flash_attention, [QKV] * 3),
    "layer_norm": (pk.layer_norm, [(N, C), (C,), (C,)]),
    "rms_norm": (pk.rms_norm, [(N, C), (C,)]),
    "softmax": (pk.softmax, [(N, C)]),
    "linear_gelu": (pk.linear_gelu, [(N, C), (C, F), (F,)]),
    "mlp": (pk.mlp, [(N, C), (C, F), (F,), (F, C)]),
    "swiglu": (pk.swiglu, [(N, C), (C, F), (C, F), (F, C)]),
    "linear_cross_entropy": (
        lambda x, w, implementation: pk.linear_cross_entropy(
            x, w, jnp.zeros(N, jnp.int32), implementation="fused"
        ),
        [(N, C), (V, C)],
    ),
}


def operations(f, arrays, policy):
    """Numbers of launches and matmuls in the gradient of f with this policy."""

    def loss(*arrays):
        return jax.checkpoint(lambda *a: f(*a).sum(), policy=policy)(*arrays)

    jaxpr = jax.make_jaxpr(jax.grad(loss, argnums=range(len(arrays))))(*arrays)
    found = [*primitives(jaxpr.jaxpr)]
    return found.count("pure_callback"), found.count("dot_general")


def primitives(jaxpr):
    """Names of all primitives, in nested functions too."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in jax.tree.leaves([*equation.params.values()]):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@pytest.mark.parametrize("name", CALLS)
def test_a_named_operation_runs_once(name, triton_on_cpu):
    f, shapes = CALLS[name]
    arrays = [jnp.ones(shape, jnp.float32) for shape in shapes]
    call = lambda *arrays: f(*arrays, implementation="triton")
    policies = jax.checkpoint_policies
    recomputed = operations(call, arrays, policies.nothing_saveable)
    named = operations(call, arrays, policies.save_only_these_names(name))
    everything = operations(call, arrays, policies.everything_saveable)
    assert sum(named) < sum(recomputed)
    assert named == everything
    other = operations(call, arrays, policies.save_only_these_names("another name"))
    assert other == recomputed
