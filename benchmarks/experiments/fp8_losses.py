"""Loss of GPT-2 124M in several precisions: the same initial weights and the same tokens.

    python benchmarks/experiments/fp8_losses.py --out losses.json

The text is the Python standard library of the running interpreter, in random order of its files. A
seed is one initialisation and one order of the windows. The learning rate is that of 124M.
"""

import dataclasses
import json
import sysconfig
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tiktoken
import tyro

from gptjax import GPT2Config, Precision, optim
from gptjax.models.base import graph
from gptjax.training.compilation import compiler_options
from gptjax.training.step import init_state, make_eval_step, make_train_step


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare precisions by their losses."""

    precisions: tuple[str, ...] = ("bf16", "fp8", "fp8_head")
    steps: int = 300
    seeds: int = 2
    batch: int = 32
    sequence_length: int = 1024
    layers: int = 12
    out: Path | None = None
    """JSON file of all losses."""


def standard_library(characters: int) -> np.ndarray:
    """Return the tokens of the standard library's larger files, each after an end-of-text token."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if 2000 < file.stat().st_size < 200_000]
    np.random.default_rng(0).shuffle(files)
    texts, total = [], 0
    for file in files:
        texts.append(file.read_text(encoding="utf-8", errors="ignore"))
        total += len(texts[-1])
        if total > characters:
            break
    encoded = tiktoken.get_encoding("gpt2").encode_ordinary_batch(texts)
    return np.concatenate([np.array([50256, *tokens], np.int32) for tokens in encoded])


def main() -> None:
    """Train each precision with each seed, and print a line for each run."""
    options, started, rows = tyro.cli(Options, description=__doc__), time.time(), []
    width, tokens = options.sequence_length + 1, standard_library(40_000_000)
    validation, train = tokens[: 64 * width].reshape(64, width), tokens[64 * width :]
    starts = np.arange(0, len(train) - width, options.sequence_length)
    print(f"{len(tokens):,} tokens", flush=True)
    rate = optim.schedule("cosine", peak=6e-4, warmup_steps=60, total_steps=options.steps)
    tx = optim.adamw(rate)
    windows = jax.ShapeDtypeStruct((1, options.batch, width), jnp.int32)
    for name in options.precisions:
        config = GPT2Config(n_layer=options.layers, precision=Precision(name))
        state = jax.eval_shape(lambda c=config: init_state(c, tx, 0))
        step = jax.jit(make_train_step(graph(config), tx, rate), donate_argnums=0)
        step = step.lower(state, windows).compile(compiler_options=compiler_options())
        evaluate = jax.jit(make_eval_step(graph(config)))
        for seed in range(options.seeds):
            rng, order = np.random.default_rng(seed), []
            while len(order) < options.steps * options.batch:
                order.extend(rng.permutation(starts))
            state, losses, norms = init_state(config, tx, seed), [], []
            for i in range(options.steps):
                chosen = order[i * options.batch : (i + 1) * options.batch]
                batch = np.stack([train[start : start + width] for start in chosen])
                state, metrics = step(state, jnp.asarray(batch[None]))
                losses.append(metrics["loss"])
                norms.append(metrics["grad_norm"])
            losses, norms = (np.array(jax.device_get(values)) for values in (losses, norms))
            parts = [evaluate(state.params, jnp.asarray(part)) for part in np.split(validation, 4)]
            row = {"precision": name, "seed": seed, "validation": float(np.mean(parts))}
            rows.append(row | {"losses": losses.tolist(), "grad_norms": norms.tolist()})
            print(
                f"{name} seed {seed}: validation {row['validation']:.4f}, last 50 steps "
                f"{losses[-50:].mean():.4f}, gradient norm {norms[-50:].mean():.3f}, "
                f"{time.time() - started:.0f} s",
                flush=True,
            )
            if options.out is not None:
                options.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
