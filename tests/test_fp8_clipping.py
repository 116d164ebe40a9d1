"""Shares of the numbers that FP8 clips, and of zeros: counted in the right place, logged and shown,
without an effect on training."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from test_fp8_models import CONFIGS, tokens, with_precision
from train_tools import losses, rows, run

from gptjax import Precision
from gptjax import parallel as parallel_module
from gptjax.models.base import graph, init_params
from gptjax.parallel import Parallel
from gptjax.precision import PRECISIONS, Parts
from gptjax.training import status_line
from gptjax.training.step import make_fp8_clipping_step
from pallas_kernels import linear
from pallas_kernels.gemm import Fp8, clipping

# The fixture `config`.
pytest_plugins = ["train_tools"]


def nonzero(model, params, parallel=None, **changes):
    config = dataclasses.replace(with_precision(model, "fp8"), **changes)
    fp8_clipping_step = jax.jit(make_fp8_clipping_step(graph(config), parallel))
    shares = fp8_clipping_step(params, tokens(), jnp.int32(0))
    shares = {name: x for name, x in shares.items() if not name.endswith(".zero")}
    names = {name.rpartition(".")[0] for name in shares}
    assert {"linear_cross_entropy.0", *NAMES[model]} <= names
    return {name: float(x) for name, x in shares.items() if x}


NAMES = {
    "gpt2": [f"{name}.{i}" for name in ("projected_attention", "mlp") for i in range(2)],
    "llama3": ["linear.0", "swiglu.0"],
    "speedrun": [*(f"mlp.{i}" for i in range(4)), *(f"linear.{i}" for i in range(3))],
}
# Parameter, index of the outlier, outlier, operand, and its largest share.
PLANTED = {
    "input": ("gpt2", ("blocks", 1, "ln_1", "bias"), 0, 100, "projected_attention.1.input", 1 / 32),
    "hidden": ("gpt2", ("blocks", 0, "mlp", "c_fc", "bias"), 0, 100, "mlp.0.hidden", 1 / 128),
    "gradient": (
        "gpt2",
        ("blocks", 1, "mlp", "c_proj", "kernel"),
        0,
        1e4,
        "mlp.1.hidden_gradient",
        1 / 128,
    ),
    "llama3": ("llama3", ("blocks", 0, "norm_2", "scale"), 0, 1e4, "swiglu.0.input", 1 / 32),
    "speedrun": ("speedrun", ("mlp_in",), 2, 1e4, "mlp.2.hidden", 1),
}


def planted(name):
    model, path, index, outlier, operand, largest = PLANTED[name]
    params = init_params(CONFIGS[model], 0)
    *path, last = path
    parent = params
    for key in path:
        parent = parent[key]
    parent[last] = parent[last].at[index].set(outlier)
    return model, params, operand, largest


@pytest.mark.parametrize("name", PLANTED)
def test_an_outlier_is_counted_in_its_place(name):
    model, params, operand, largest = planted(name)
    found = nonzero(model, params)
    assert found.keys() == {operand}
    assert 0 < found[operand] <= largest
    if name in ("input", "hidden"):  # one number of each token
        assert found[operand] == largest


@pytest.mark.parametrize("changes", [{"recompute": "block"}, "data", "fsdp"])
def test_with_recomputation_and_on_two_devices(monkeypatch, changes):
    model, params, operand, largest = planted("hidden")
    parallel = None
    if isinstance(changes, str):
        monkeypatch.setattr(parallel_module, "SMALLEST_SHARDED", 200)
        parallel = Parallel.of(jax.devices("cpu")[:2], changes)
        params, changes = jax.device_put(params, parallel.shardings(params)), {}
    assert nonzero(model, params, parallel, **changes) == {operand: largest}


def test_an_operand_with_more_numbers_than_int32_counts():
    """As the gradient of the logits of 65,536 tokens."""
    x_NI, w_IO = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2**17, 16), (16, 2**15)))

    def found(x_NI, w_IO):
        return clipping.shares(lambda: linear(x_NI, w_IO, numerics="fp8").sum())

    assert jax.eval_shape(found, x_NI, w_IO)["linear.0.output_gradient"].shape == ()


def test_a_call_inside_a_call_is_no_call_of_its_own():
    """As `projected_attention` on Hopper, which calls `linear` where it is not differentiated."""
    x = jnp.ones((16, 16)).at[0, 0].set(100)

    @jax.custom_vjp
    def outer(x):
        return linear(x, jnp.eye(16), numerics="fp8")

    def forward(x):
        Fp8().input(x, None)
        return outer(x), None

    outer.defvjp(forward, lambda _, dy: (dy,))

    def loss():
        first, second = (
            jax.checkpoint(lambda x: clipping.counted("outer", outer)(x)) for _ in range(2)
        )
        return second(first(x)).sum()

    found = clipping.shares(loss)
    assert {name: float(share) for name, share in found.items()} == {
        "outer.0.input": 1 / 256,
        "outer.0.input.zero": 0,
        "outer.1.input": 1 / 256,
        "outer.1.input.zero": 0,
    }


def test_numbers_that_underflow_are_zeros():
    """e4m3's least number is 2⁻⁹, here of x times 8; half of it is rounded to 0."""
    x_NI = jnp.ones((16, 16)).at[0, :3].set(jnp.array([2.0**-13, 2.0**-12, 1e-9]))
    dy_NO = jnp.ones((16, 16)).at[1].set(0)
    found = clipping.shares(lambda: (dy_NO * linear(x_NI, jnp.eye(16), numerics="fp8")).sum())
    assert found["linear.0.input.zero"] == 2 / 256 and found["linear.0.input"] == 0
    assert found["linear.0.output_gradient.zero"] == 1 / 16


def test_log_and_status_line(config, monkeypatch):
    """With a scale that clips the output of the norms. The losses are those of a run without
    counts, bit for bit."""
    parts = Parts("bf16", "bfloat16", blocks=Fp8(activation_scale=256.0), head="fp8")
    monkeypatch.setitem(PRECISIONS, "fp8", parts)
    monkeypatch.setattr(status_line, "LOG_EVERY", 1)
    model = dataclasses.replace(config.model, precision=Precision("fp8"))
    on = dataclasses.replace(
        config, model=model, max_steps=5, val_every=2, sample_every=0, checkpoint_every=0
    )
    code, shown = run(on)
    assert code == 0 and list(counts := rows(on, "clipping")) == [2, 4, 5]
    assert 0 < counts[4]["mlp.0.input"] < 1 and counts[4]["linear_cross_entropy.0.input"] == 0
    # The gradients of the padded logits are 0.
    assert counts[4]["linear_cross_entropy.0.output_gradient.zero"] > 0
    greatest = max(counts[4][f"{name}.0.input"] for name in ("mlp", "projected_attention"))
    lines = [line for line in shown.splitlines() if " · loss " in line]
    assert "clips" not in lines[0] and f"FP8 clips {greatest:.1e} (" in lines[-1]

    off = dataclasses.replace(on, name="off", val_every=0)
    code, shown = run(off)
    assert code == 0 and not rows(off, "clipping") and "clips" not in shown
    assert losses(on) == losses(off)
