"""The tiny GPT-2 of the course, and its training text.

Shapes: B batch, T time, V vocabulary, C channels.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import gptjax

# The vocabulary is the 256 values of a byte, and END_OF_TEXT, which precedes each document.
END_OF_TEXT = 256
CONFIG = gptjax.GPT2Config(vocab_size=257, block_size=32, n_layer=2, n_head=2, n_embd=32)
# 80 questions with answers, in the public domain.
TEXT = Path(__file__).parents[2] / "examples" / "finetune" / "pairs.jsonl"


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Return an fp32 array from N(0, 1) for each shape; every call returns the same numbers.

    NumPy's generator: JAX would compile one for each shape.
    """
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def read_documents() -> list[str]:
    """Return the documents of the training text: a question and its answer, a line each."""
    pairs = [json.loads(line) for line in TEXT.read_text(encoding="utf-8").splitlines()]
    return [f"{pair['prompt']}\n{pair['answer']}\n" for pair in pairs]


def read_windows(batch: int, length: int) -> np.ndarray:
    """Return the first windows of the text: int32 bytes of shape (batch, length + 1)."""
    tokens_N = np.frombuffer("".join(read_documents()).encode(), np.uint8).astype(np.int32)
    return tokens_N[: batch * (length + 1)].reshape(batch, length + 1)


@functools.cache
def gptjax_model(precision: str = "fp32") -> gptjax.GPT2:
    """Return gptjax's model of the course's size, with random parameters."""
    config = gptjax.GPT2Config(
        vocab_size=CONFIG.vocab_size,
        block_size=CONFIG.block_size,
        n_layer=CONFIG.n_layer,
        n_head=CONFIG.n_head,
        n_embd=CONFIG.n_embd,
        precision=gptjax.Precision(precision),
    )
    return gptjax.GPT2(config, rngs=nnx.Rngs(0))


def params_of(model: gptjax.GPT2) -> dict:
    """Return the parameters of gptjax's model as the course stores them.

    The blocks are a list, and the embedding has no padded rows.
    """
    params = nnx.to_pure_dict(nnx.split(model, nnx.Param)[1])
    blocks = [params["blocks"][i] for i in range(model.config.n_layer)]
    wte_VC = params["wte"][: model.config.vocab_size]
    return params | {"blocks": blocks, "wte": wte_VC}
