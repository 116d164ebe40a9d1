"""Sampled texts during training."""

import jax
from flax import nnx

from gptjax import processes
from gptjax.config import Config
from gptjax.generation.stream import complete
from gptjax.models.base import graph
from gptjax.parallel import Parallel
from gptjax.training.inputs import Inputs
from gptjax.training.step import TrainState

# Tokens of a sample, or fewer with a smaller block size.
TOKENS = 128


def draw(
    config: Config,
    inputs: Inputs,
    parallel: Parallel,
    state: TrainState,
    step: int,
) -> str | None:
    """Sample a text after the end-of-text token. Return None in all processes except process 0.

    Args:
        config: config of the current stage.

    Every process must call this function, which gathers the parameters.
    """
    tokenizer = inputs.tokenizer
    assert tokenizer is not None
    length = min(TOKENS, config.model.block_size - 1)
    params, rng = processes.on_one_device((parallel.whole(state.params), state.rng))
    if jax.process_index():
        return None
    key = jax.random.fold_in(jax.random.wrap_key_data(rng), step)
    model = nnx.merge(graph(config.model.for_evaluation()), params)
    how = {"max_new_tokens": length, "key": key, "stop_at_eot": False}
    *_, (completion,) = complete(model, tokenizer, [[tokenizer.eot]], **how)
    return completion.text
