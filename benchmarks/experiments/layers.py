"""Blocks unrolled or in `lax.scan`? Step time, compile time and memory of both.

    python benchmarks/experiments/layers.py --out benchmarks/results/layers.json

The model unrolls its blocks. Here they are also stacked and scanned, with the same modules, head
and optimizer.
"""

import dataclasses
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx

from gptjax import optim
from gptjax.bench import results
from gptjax.bench.table import Row, print_table
from gptjax.models.base import graph, loss_fn
from gptjax.models.gpt2 import PRESETS, Block, GPT2Config
from gptjax.precision import Precision
from gptjax.training.memory import GIB, needed_bytes
from gptjax.training.step import init_state
from pallas_kernels import linear_cross_entropy

CASES = ("gpt2:bf16:64", "gpt2:tf32:16", "gpt2:bf16:4", "gpt2-xl:bf16:4")


@dataclasses.dataclass(frozen=True)
class Options:
    """Time complete GPT-2 training steps with unrolled and with scanned blocks."""

    out: Path | None = None
    """JSON file for the results."""
    cases: tuple[str, ...] = CASES
    """preset:precision:batch, each at T = 1024."""
    steps: int = 20
    """Timed steps of each, after three steps of warm-up."""


def unrolled_loss(config: GPT2Config):
    graphdef = graph(config)
    return lambda params, windows: loss_fn(
        nnx.merge(graphdef, params), windows[:, :-1], windows[:, 1:]
    )


def scanned_loss(config: GPT2Config):
    # Embedding, final norm and head come from a model of one block; the scan runs that block.
    shell = graph(dataclasses.replace(config, n_layer=1))
    block = nnx.split(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))), nnx.Param)[0]

    def loss(params, windows):
        model = nnx.merge(
            shell, params | {"blocks": {0: jax.tree.map(lambda x: x[0], params["blocks"])}}
        )
        x_BTC = model.embed(windows[:, :-1])
        x_BTC, _ = jax.lax.scan(
            lambda x, p: (nnx.merge(block, p)(x), None), x_BTC, params["blocks"]
        )
        x_NC = model.ln_f(x_BTC).reshape(-1, config.n_embd)
        wte_VC = model.wte[...].astype(x_NC.dtype)
        losses_N = linear_cross_entropy(
            x_NC,
            wte_VC,
            windows[:, 1:].reshape(-1),
            vocab_size=config.vocab_size,
            precision=config.precision.matmul,
        )
        return losses_N.mean()

    return loss


def measure(case: str, layout: str, steps: int) -> dict:
    preset, precision, batch = case.split(":")
    config = dataclasses.replace(PRESETS[preset], precision=Precision(precision))
    loss = {"unrolled": unrolled_loss, "scanned": scanned_loss}[layout](config)
    tx = optim.adamw(6e-4)

    def step(state, windows):
        params, opt_state = state
        value, grads = jax.value_and_grad(loss)(params, windows)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), value

    def init():
        params = init_state(config, optax.identity(), 0).params
        if layout == "scanned":
            blocks = [params["blocks"][i] for i in range(config.n_layer)]
            params["blocks"] = jax.tree.map(lambda *leaves: jnp.stack(leaves), *blocks)
        return params, tx.init(params)

    windows = jax.random.randint(jax.random.key(0), (int(batch), 1025), 0, config.vocab_size)
    started = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=0).lower(jax.eval_shape(init), windows).compile()
    compile_s = time.perf_counter() - started
    state, times = init(), []
    for i in range(steps + 3):
        jax.block_until_ready(state)
        started = time.perf_counter()
        state, value = compiled(state, windows)
        jax.block_until_ready(value)
        times.append(1e3 * (time.perf_counter() - started))
        if i == 0:
            first_loss = float(value)
    return {
        "case": case,
        "layout": layout,
        "ms": round(statistics.median(times[3:]), 2),
        "compile_s": round(compile_s, 1),
        "gib": round(needed_bytes(compiled) / GIB, 2),
        "first_loss": first_loss,
    }


def main(options: Options) -> None:
    rows = []
    for case in options.cases:
        for layout in ("unrolled", "scanned"):
            rows.append(measure(case, layout, options.steps))
            print(rows[-1], flush=True)
    names = {"ms": "ms a step", "compile_s": "compile s", "gib": "GiB", "first_loss": "first loss"}
    table = [
        Row(f"{row['case']}, {row['layout']}", [str(row[key]) for key in names]) for row in rows
    ]
    print_table(jax.devices()[0].device_kind, list(names.values()), table)
    if options.out:
        command = results.script_command("benchmarks/experiments/layers.py")
        device = jax.devices()[0].device_kind
        results.write(options.out, results.new(command, rows, device=device))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
