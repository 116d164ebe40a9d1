"""Errors of the gradients of GPT-2 in bf16 and FP8, of gptjax and of PyTorch.

    python benchmarks/experiments/fp8_gradients.py --steps 100 --out gradients.json
    python benchmarks/experiments/fp8_gradients.py --layers 2 --heads 2 --width 64

All gradients are means over `--batches` batches, computed from the same weights. The exact gradient
is PyTorch's in fp64. The error of a gradient g is |g - exact| / |exact|, with the norm over all
parameters of a group. Errors that are independent between tokens decrease with more batches.

- Columns: the groups "fc" and "proj" are the matrices of the MLP. "loss" is the error of the loss.
  "length" is the relative error of the length of g, measured along the exact gradient.
- The row "other tokens" is the exact gradient of as many other batches. Its error is the noise of
  stochastic gradient descent.

PyTorch's FP8 is src/gptjax/bench/torch_fp8.py: all linear layers of the blocks and the head use
`torch._scaled_mm`, which also runs on a CPU, with a dynamic scale of each tensor. With fp8_head,
only the head does. bf16 is autocast. PyTorch runs without `torch.compile`.

The training text is the Python standard library of the running interpreter.
"""

import dataclasses
import math
import sysconfig
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tiktoken
import torch
import tyro
from flax import nnx
from torch.nn import functional

from gptjax import GPT2Config, Precision, loss_fn, optim
from gptjax.bench import results, torch_fp8
from gptjax.bench.table import Row, print_table
from gptjax.bench.torch_gpt2 import GPT2, How, free_torch
from gptjax.models.base import graph
from gptjax.precision import NAMES
from gptjax.training.compilation import compiler_options
from gptjax.training.step import init_state, make_train_step

# The parameters of a group, by a part of their names.
GROUPS = {
    "all": "",
    "wte": "wte",
    "wpe": "wpe",
    "qkv": "attn.c_attn.kernel",
    "attention out": "attn.c_proj.kernel",
    "fc": "mlp.c_fc.kernel",
    "proj": "mlp.c_proj.kernel",
    "norms": "ln_",
    "biases": ".bias",
}
EXACT, OTHER = "torch fp64", "other tokens"


@dataclasses.dataclass(frozen=True)
class Options:
    """Compare gradients in several precisions with those in fp64."""

    precisions: tuple[Literal[*NAMES], ...] = ("fp32", "bf16", "fp8_head", "fp8")
    """Precisions of gptjax."""
    torch_precisions: tuple[Literal["fp32", "bf16", "fp8_head", "fp8"], ...] = (
        "bf16",
        "fp8_head",
        "fp8",
    )
    """Precisions of PyTorch."""
    steps: int = 0
    """Training steps in bf16 before the gradients are computed."""
    batches: int = 1
    """Batches over which the gradient is averaged."""
    batch: int = 4
    """Sequences of a batch."""
    sequence_length: int = 1024
    """Tokens of a sequence."""
    layers: int = 12
    """Layers of the model."""
    heads: int = 12
    """Heads of attention."""
    width: int = 768
    """Channels of the residual stream."""
    out: Path | None = None
    """JSON file for the results."""


def standard_library(tokens: int) -> np.ndarray:
    """Return at least so many tokens of the standard library's larger files."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    files = [file for file in files if 2000 < file.stat().st_size < 200_000]
    np.random.default_rng(0).shuffle(files)
    encoding, found, total = tiktoken.get_encoding("gpt2"), [], 0
    for file in files:
        text = file.read_text(encoding="utf-8", errors="ignore")
        found.append(np.array([50256, *encoding.encode_ordinary(text)], np.int32))
        total += len(found[-1])
        if total >= tokens:
            return np.concatenate(found)
    raise SystemExit(f"fp8_gradients: expected {tokens:,} tokens of text, got {total:,}")


def names_of(params: dict) -> dict[str, np.ndarray]:
    """Return name → array of a tree of parameters or gradients."""
    leaves = jax.tree.leaves_with_path(params)
    return {".".join(str(key.key) for key in path): np.asarray(leaf) for path, leaf in leaves}


# ------------------------------------------------------------------------------------------- gptjax


def trained(config: GPT2Config, windows: np.ndarray) -> dict:
    """Return the parameters after a step in bf16 on each batch of windows."""
    config = dataclasses.replace(config, precision=Precision("bf16"))
    rate = optim.schedule("cosine", peak=6e-4, warmup_steps=20, total_steps=max(40, len(windows)))
    tx = optim.adamw(rate)
    state = init_state(config, tx, 0)
    if len(windows) == 0:
        return state.params
    shape = jax.ShapeDtypeStruct((1, *windows.shape[1:]), jnp.int32)
    step = jax.jit(make_train_step(graph(config), tx), donate_argnums=0)
    step = step.lower(state, shape).compile(compiler_options=compiler_options())
    for batch in windows:
        state, _ = step(state, jnp.asarray(batch[None]))
    return state.params


def mean_of(results: Iterable[tuple[float, dict]]) -> tuple[float, dict]:
    """Return the means of losses and gradients, in fp64."""
    count, loss, gradients = 0, 0.0, {}
    for each, found in results:
        count, loss = count + 1, loss + each
        for name, gradient in found.items():
            gradients[name] = gradients.get(name, 0.0) + gradient.astype(np.float64)
    return loss / count, {name: gradient / count for name, gradient in gradients.items()}


def gptjax_gradients(config: GPT2Config, params: dict, batches: np.ndarray, names):
    """Yield name, mean loss and mean gradients of each precision. The executables compile
    concurrently."""

    def lowered(name):
        graphdef = graph(dataclasses.replace(config, precision=Precision(name)))

        def loss(params, windows):
            return loss_fn(nnx.merge(graphdef, params), windows[:, :-1], windows[:, 1:])

        return jax.jit(jax.value_and_grad(loss)).lower(params, batches[0])

    with ThreadPoolExecutor() as pool:
        options = {"compiler_options": compiler_options()}
        waiting = [(name, pool.submit(lowered(name).compile, **options)) for name in names]
        for name, compiled in waiting:
            step = compiled.result()
            found = (step(params, windows) for windows in batches)
            yield f"gptjax {name}", *mean_of((float(loss), names_of(g)) for loss, g in found)


# ------------------------------------------------------------------------------------------ PyTorch


def torch_gradients(config: GPT2Config, params: dict, batches: np.ndarray, precision: str):
    """Return mean loss and mean gradients of PyTorch's model, with gptjax's names.

    Args:
        precision: fp64, or one of `How`.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = How(precision="fp32" if precision == "fp64" else precision, compiled=False)
    model = GPT2(config, how)
    model.head_loss = lambda *args: head_loss(*args, vocabulary=config.vocab_size)
    own = dict(model.named_parameters())
    own |= {
        name.replace(".weight", ".kernel" if parameter.ndim == 2 else ".scale"): parameter
        for name, parameter in own.items()
    }
    with torch.no_grad():
        for name, value in params.items():
            value = torch.tensor(value)
            own[name].copy_(value.T if name.endswith(".kernel") else value)
    model.to(device, torch.float64 if precision == "fp64" else torch.float32)

    def of_batch(windows: np.ndarray) -> tuple[float, dict]:
        model.zero_grad()
        tokens = torch.tensor(windows, device=device).long()
        with torch.autocast(device, torch.bfloat16, enabled=how.autocast):
            loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        gradients = {}
        for name in params:
            gradient = own[name].grad.cpu().numpy()
            gradients[name] = gradient.T if name.endswith(".kernel") else gradient
        return loss.item(), gradients

    found = mean_of(map(of_batch, batches))
    del model, own
    free_torch()
    return found


def head_loss(x_BTC, scale_C, bias_C, wte_VC, targets_BT, fp8: bool, *, vocabulary: int):
    """Return the loss as gptjax defines it: padding is no part of the vocabulary."""
    x_BTC = functional.layer_norm(x_BTC, scale_C.shape, scale_C, bias_C)
    logits_BTV = (torch_fp8.linear if fp8 else functional.linear)(x_BTC, wte_VC)
    logits_NV = logits_BTV.flatten(0, 1)[:, :vocabulary]
    logits_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
    return functional.cross_entropy(logits_NV, targets_BT.flatten())


# ------------------------------------------------------------------------------------------- errors


def errors(found: dict, exact: dict) -> dict[str, float]:
    """Return the relative error of each group, and `length` - 1: the part along the gradient."""
    squares = {}
    for name, right in exact.items():
        right = right.astype(np.float64)
        apart = found[name].astype(np.float64) - right
        squares[name] = (np.vdot(apart, apart), np.vdot(right, right), np.vdot(apart, right))
    result = {}
    for group, part in GROUPS.items():
        apart, right, _ = np.sum([s for name, s in squares.items() if part in name], axis=0)
        result[group] = math.sqrt(apart / right)
    _, right, along = np.sum(list(squares.values()), axis=0)
    return result | {"length": along / right}


def main(options: Options) -> None:
    if options.batch * options.sequence_length % 16 or options.width % 16:
        raise SystemExit(
            "fp8_gradients: expected multiples of 16 as number of tokens and as width, got "
            f"{options.batch} × {options.sequence_length} tokens and {options.width}"
        )
    started = time.time()
    config = GPT2Config(
        n_layer=options.layers,
        n_head=options.heads,
        n_embd=options.width,
        block_size=options.sequence_length,
    )
    size = options.batch * (options.sequence_length + 1)
    compared = 2 * options.batches
    count = options.steps + compared
    windows = standard_library(count * size)[: count * size]
    windows = windows.reshape(count, options.batch, options.sequence_length + 1)
    params = trained(config, windows[compared:])
    batches, others = windows[: options.batches], windows[options.batches : compared]
    host = names_of(params)
    exact_loss, exact = torch_gradients(config, host, batches, "fp64")
    print(f"{EXACT}: loss {exact_loss:.6f}, {time.time() - started:.0f} s", flush=True)
    rows = []

    def add(name: str, loss: float, gradients: dict) -> None:
        row = {"name": name, "loss": loss, "loss_error": loss - exact_loss}
        rows.append(row | errors(gradients, exact))
        print(f"{name}: {rows[-1]['all']:.3g}, {time.time() - started:.0f} s", flush=True)

    for result in gptjax_gradients(config, params, batches, options.precisions):
        add(*result)
    del params
    for precision in options.torch_precisions:
        add(f"torch {precision}", *torch_gradients(config, host, batches, precision))
    add(OTHER, *torch_gradients(config, host, others, "fp64"))
    show(rows, f"loss {exact_loss:.4f} after {options.steps} steps")
    if options.out:
        command = results.script_command("benchmarks/experiments/fp8_gradients.py")
        device = jax.devices()[0].device_kind
        result = results.new(command, rows, device=device, packages=("torch",))
        results.write(options.out, result)


def show(rows: list[dict], about: str) -> None:
    """Print the relative errors in per cent."""
    table = [
        Row(
            row["name"],
            [
                f"{row['loss_error']:+.1e}",
                *(f"{100 * row[group]:.3g}" for group in GROUPS),
                f"{100 * row['length']:+.2g}",
            ],
        )
        for row in rows
    ]
    title = f"{jax.devices()[0].device_kind}, {about}: errors of the gradients in %"
    print_table(title, ["loss", *GROUPS, "length"], table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
