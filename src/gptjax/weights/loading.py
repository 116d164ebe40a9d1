"""`gptjax.load`: a model and its tokenizer from a run, a checkpoint or a file."""

import dataclasses
import os
from typing import Any, NamedTuple

from gptjax.data.tokenizers import (
    VOCABULARIES,
    Tokenizer,
    TokenizerChoice,
    TokenizerUnavailable,
    get_tokenizer,
)
from gptjax.models.base import Model, ModelConfig, abstract_params
from gptjax.precision import Precision
from gptjax.weights import sources
from gptjax.weights.errors import DamagedError, WeightsError
from gptjax.weights.params import model_from_params


class Loaded(NamedTuple):
    """A model and its tokenizer: `model, tokenizer = gptjax.load(path)`.

    Attributes:
        tokenizer: None if the tokenizer is not known or was not asked for.
    """

    model: Model
    tokenizer: Tokenizer | None


def load(
    path: str | os.PathLike,
    *,
    precision: Precision | None = None,
    step: int | None = None,
    tokenizer: TokenizerChoice | None = "auto",
    **options: Any,
) -> Loaded:
    """Load a model and its tokenizer from disk.

    The architecture and its shape come from the path. An architecture outside gptjax must have been
    imported before. No code is executed from a file. In a run with stages, the model is the
    evaluation model of the last stage that the checkpoint reached.

    Args:
        path: a run's folder such as runs/gpt2_tiny, the folder of one of its checkpoints, a Hugging
            Face GPT-2 or Llama (folder or .safetensors file), an llm.c .bin file, or a .pt file of
            modded-nanogpt's pull request #233.
        precision: precision of the model. None: the run's precision, and fp32 for other files.
        step: step of a run's checkpoint; None for the newest.
        tokenizer: "auto": the tokenizer of the run's data; "gpt2" for files with a vocabulary of
            50,257, and no tokenizer for files with another vocabulary. A name selects the
            tokenizer. None loads no tokenizer.
        options: fields of the model's config that do not change what the model computes: loss,
            loss_chunk, recompute, and fields of the architecture, such as attention. Missing
            options have their defaults, not the run's values.

    Raises:
        WeightsError: the path holds no model that gptjax can compute.
        DamagedError: the checkpoint changed after it was saved; a WeightsError. The message names
            the other steps.
        TokenizerUnavailable: the files of GPT-2's tokenizer are neither cached nor downloadable.
        ValueError: a wrong option.
    """
    if precision is not None and not isinstance(precision, Precision):
        raise ValueError(
            "load: expected precision to be a gptjax.Precision, such as gptjax.Precision('bf16'), "
            f"got {precision!r}"
        )
    source = sources.find(path, step=step)
    config = source.config(precision=precision, **options).for_evaluation()
    _check_kernels(config, options)
    chosen = _tokenizer(source.tokenizer if tokenizer == "auto" else tokenizer, config.vocab_size)
    like = sources.on_default_device(abstract_params(config))
    try:
        params = source.read(config, like)
    except DamagedError as error:
        raise DamagedError(f"{error}{sources.other_steps(source.path)}") from error
    return Loaded(model_from_params(config, params), chosen)


def _check_kernels(config: ModelConfig, options: dict[str, Any]) -> None:
    """Raise ValueError for the name of an unknown back end, which generation might not use."""
    defaults = {f.name: f.default for f in dataclasses.fields(config) if f.name in options}
    for name in options:
        alone = dataclasses.replace(config, **defaults | {name: options[name]})
        try:
            alone.kernels(config.block_size)
        except ValueError as error:
            # A known back end that cannot run here raises an error when it is called.
            if "unknown implementation" in str(error):
                raise ValueError(f"load: {error}") from error


def _tokenizer(name: str | None, vocab_size: int) -> Tokenizer | None:
    if name is None:
        return None
    if name in VOCABULARIES and VOCABULARIES[name][0] > vocab_size:
        raise WeightsError(
            f"load: expected a model of at least the {VOCABULARIES[name][0]} ids of the tokenizer "
            f"{name}, found a vocabulary of {vocab_size}"
        )
    try:
        return get_tokenizer(name)
    except TokenizerUnavailable as error:
        raise TokenizerUnavailable(f"{error}; or load no tokenizer: tokenizer=None") from error
