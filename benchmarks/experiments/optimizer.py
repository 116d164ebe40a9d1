"""The complete optimizer update of GPT-2 124M, clip included.

    python -m gptjax.bench kernels benchmarks/experiments/optimizer.py

Ten updates in a loop are one call: an update has some 600 arrays, and an executable for one update
waits for the host. The bytes are those of gradients, moments and parameters, all fp32,
each read once and all but the gradients written once. Polar Express by itself is in
polar_express.py.
"""

import functools

import jax
import optax

from gptjax import optim, parallel
from gptjax.bench.harness import Case
from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
from gptjax.training.step import init_state

UPDATES = 10
# What an update reads and writes, in parameters: gradient, parameter and moments read, the last two
# written.
PASSES = {"adamw": 7, "normuon": 5, "muon": 5}


def cases() -> list[Case]:
    bars = {"normuon": "≤ 50 ms: 5.0 an update", "adamw": "", "muon": ""}
    return [
        Case(
            kernel="optimizer",
            name=f"{UPDATES} updates of 124M parameters, {algorithm}",
            make=functools.partial(_inputs, algorithm),
            run={algorithm: _updates(_built(algorithm))},
            torch={"torch": _in_torch} if algorithm == "adamw" else {},
            bytes=UPDATES * 4 * GPT2Config().num_params * PASSES[algorithm],
            bar=bar,
        )
        for algorithm, bar in bars.items()
    ]


@functools.cache
def _built(algorithm: str) -> optax.GradientTransformation:
    """As train.py builds it."""
    config = Config(optimizer=optim.ALGORITHMS[algorithm]())
    return config.build_optimizer(parallel.data_mesh(jax.devices()[:1]))


def _updates(tx):
    def run(grads, state, params):
        def update(_, carry):
            # Gradients that are new each time, as far as the compiler knows: else it takes what
            # depends on them alone out of the loop.
            grads, state, params = jax.lax.optimization_barrier(carry)
            updates, state = tx.update(grads, state, params)
            return grads, state, optax.apply_updates(params, updates)

        return jax.lax.fori_loop(0, UPDATES, update, (grads, state, params))[1:]

    return run


def _inputs(algorithm, key):
    params = init_state(GPT2Config(), optax.identity(), 0).params
    keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))
    grads = jax.tree.map(lambda p: 0.01 * jax.random.normal(next(keys), p.shape), params)
    return grads, _built(algorithm).init(params), params


def _in_torch(torch):
    """Parameters and gradients of the same shapes, and PyTorch's own fused AdamW."""
    shapes = jax.eval_shape(lambda: init_state(GPT2Config(), optax.identity(), 0).params)
    params = [
        torch.nn.Parameter(0.02 * torch.randn(p.shape, device="cuda"))
        for p in jax.tree.leaves(shapes)
    ]
    for p in params:
        p.grad = 0.01 * torch.randn_like(p)
    adamw = torch.optim.AdamW(
        params, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True, capturable=True
    )

    def run(*_):
        for _ in range(UPDATES):
            torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
            adamw.step()

    return run
