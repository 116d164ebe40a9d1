"""A model from random weights; GPT-2 and its PyTorch reference, compared by the 2× rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from comparison_tools import assert_within_twice, flatten, max_abs, random_params
from flax import nnx
from kernel_tools import OPTIMIZED

from gptjax import GPT2Config, loss_fn
from gptjax.models.base import abstract_params, graph

# (vocabulary, padded, time, layers, heads, width, batch)
SHAPES = {
    # odd T, three heads, a head dimension of 4, a prime vocabulary
    "odd": (61, 64, 7, 2, 3, 12, 2),
    "one of each": (5, 5, 1, 1, 1, 3, 1),  # T = 1: attention over one key; no padding; odd width
    "wide head": (97, 128, 33, 1, 3, 63, 3),  # odd width, T just above a power of two
    "tiny gpt2": (257, 384, 64, 4, 4, 64, 2),
}


def config_of(shape, **how):
    vocab, padded, time, layers, heads, width, _ = shape
    sizes = {"vocab_size": vocab, "padded_vocab_size": padded, "block_size": time}
    return GPT2Config(**sizes | {"n_layer": layers, "n_head": heads, "n_embd": width} | how)


def split(config):
    """The static graph and the abstract parameters."""
    return graph(config), abstract_params(config)


def build(config, params):
    return nnx.merge(graph(config), jax.tree.map(jnp.asarray, params))


def random_of(config, seed=0):
    return random_params(split(config)[1], config.vocab_size, seed)


def batch_of(config, size=2, seed=0, time=None):
    shape = (2, size, time or config.block_size)
    return np.random.default_rng(seed).integers(0, config.vocab_size, shape).astype(np.int32)


def run(config, params, tokens, targets, compiler_options=None):
    """Logits, loss and gradients of our model, in fp64; the padded rows' gradient is checked and
    left out."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def everything(params, tokens, targets):
        model = lambda params: nnx.merge(graph(config), params)
        loss, grads = jax.value_and_grad(lambda params: loss_fn(model(params), tokens, targets))(
            params
        )
        return model(params)(tokens).astype(jnp.float32), loss, grads

    logits, loss, grads = everything(
        jax.tree.map(jnp.asarray, params), jnp.asarray(tokens), jnp.asarray(targets)
    )
    assert loss.dtype == jnp.float32
    grads = {name: np.asarray(grad, np.float64) for name, grad in flatten(grads).items()}
    for name in {"wte", "lm_head"} & grads.keys():
        assert not grads[name][config.vocab_size :].any(), f"a padded row of {name} has a gradient"
        grads[name] = grads[name][: config.vocab_size]
    return np.asarray(logits, np.float64), float(loss), grads


def run_torch(config, params, tokens, targets, *, dtype="float32", precision="fp32", device="cpu"):
    """The same of the PyTorch reference."""
    import torch
    from reference.torch_gpt2 import computing, from_params, to_numpy

    dtype = getattr(torch, dtype)
    residual = torch.bfloat16 if precision == "bf16" else None
    model = from_params(config, params, dtype=dtype, device=device, residual=residual)
    tokens, targets = (torch.from_numpy(x).long().to(device) for x in (tokens, targets))
    with computing(precision, device):
        logits, loss = model(tokens), model.loss(tokens, targets)
        if not precision.startswith("bf16"):
            loss.backward()
    if precision.startswith("bf16"):
        loss.backward()
    result = logits.detach().double().cpu().numpy(), loss.item(), to_numpy(model, gradients=True)
    del model, logits, loss
    torch.cuda.empty_cache()  # other tests use the same GPU
    return result


def assert_parity(config, size, *, norm, device="cpu", time=None, seed=0):
    """Logits, loss and the gradient of every parameter under the 2× rule; exact is PyTorch in
    fp64."""
    params = random_of(config, seed)
    tokens, targets = batch_of(config, size, seed, time)
    ours = run(config, params, tokens, targets, OPTIMIZED)
    theirs = run_torch(
        config, params, tokens, targets, precision=config.precision.name, device=device
    )
    exact = run_torch(config, params, tokens, targets, dtype="float64", device=device)
    assert exact[0].std() > 0.1, "logits this flat would agree with any model's"
    assert_within_twice(ours[0], theirs[0], exact[0], norm=norm, name="logits")
    assert ours[2].keys() == theirs[2].keys() == exact[2].keys()
    for name in exact[2]:
        assert_within_twice(ours[2][name], theirs[2][name], exact[2][name], norm=norm, name=name)
    off = {
        name: norm(ours[2][name] - exact[2][name]) / (norm(exact[2][name]) or 1.0)
        for name in exact[2]
    }
    worst = max(off, key=off.get)
    print(
        f"parity, {config.precision}, {device}, {config.n_layer} layers, {config.n_embd} wide: "
        "logits off by "
        f"{max_abs(ours[0] - exact[0]):.2g} (PyTorch {max_abs(theirs[0] - exact[0]):.2g}), loss "
        f"{abs(ours[1] - exact[1]):.2g}, "
        f"{len(off)} gradients at most {off[worst]:.2g} of their size ({worst})"
    )
    return ours, theirs, exact
