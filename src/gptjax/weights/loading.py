"""`gptjax.load`: a model and its tokenizer from a run, a checkpoint or a file."""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple, cast

from gptjax.data.tokenizers import (
    TOKENIZERS,
    AnyTokenizer,
    Tokenizer,
    TokenizerUnavailable,
    get_tokenizer,
)
from gptjax.models.base import Model
from gptjax.models.gpt2 import GPT2
from gptjax.models.llama3 import Llama3
from gptjax.precision import Precision
from gptjax.weights import hf, llmc, sources
from gptjax.weights.errors import WeightsError
from gptjax.weights.params import model_from_params

FP32 = Precision("fp32")


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
    tokenizer: str | os.PathLike | None = "auto",
    **options: Any,
) -> Loaded:
    """Load a model and its tokenizer from disk.

    The architecture and its shape come from the path. An architecture outside gptjax must have been
    imported before. No code is executed from a file. In a run with stages, the model is the
    evaluation model of the last stage that the checkpoint reached.

    Args:
        path: a run's folder such as runs/gpt2_tiny, the folder of one of its checkpoints, a Hugging
            Face GPT-2 or Llama (folder or .safetensors file), or an llm.c .bin file.
        precision: precision of the model. None: the run's precision, and fp32 for other files.
        step: step of a run's checkpoint; None for the newest.
        tokenizer: "auto": the tokenizer of the run's data; for other files, the tokenizer.json in
            the folder, or else the tokenizer with the model's vocabulary of 50,257 (or 50,304 with
            padding) or 257 ids, if any. "gpt2", "byte" or the path of a tokenizer.json selects the
            tokenizer. None loads no tokenizer.
        options: fields of the model's config that do not change what the model computes: loss,
            loss_chunk, recompute, and fields of the architecture, such as attention. Missing
            options have their defaults, not the run's values.

    Raises:
        WeightsError: the path holds no model that gptjax can compute.
        DamagedError: the checkpoint changed after it was saved; a WeightsError.
        TokenizerUnavailable: the files of GPT-2's tokenizer are neither cached nor downloadable.
        ValueError: a wrong option.
    """
    source = sources.find(path, step=step)
    config = source.config(precision=precision, **options).for_evaluation()
    own = tokenizer == "auto"
    chosen = _tokenizer(source.tokenizer_at if own else tokenizer, config.vocab_size)
    if own and chosen is not None and chosen.name != source.tokenizer:
        raise WeightsError(
            f"{source.tokenizer_at}: expected the tokenizer {source.tokenizer} of the run, found "
            f"{chosen.name}; restore its tokenizer.json"
        )
    return Loaded(model_from_params(config, source.read(config)), chosen)


def load_hf(
    path: str | os.PathLike,
    *,
    precision: Precision = FP32,
    padded_vocab_size: int | None = None,
    **options: Any,
) -> GPT2 | Llama3:
    """Load a Hugging Face GPT-2 or Llama from disk.

    Tensors in bf16, fp16 or fp64 are converted to fp32. Dropout rates are ignored: gptjax has no
    dropout.

    Args:
        path: a folder with config.json and model.safetensors (or shards model-*.safetensors), or
            one .safetensors file in the same folder as config.json.
        precision: precision of the model. The parameters are fp32 in every precision.
        padded_vocab_size: rows of the embedding. None: the next multiple of 128.
        **options: other fields of the model's config that the folder does not determine, such as
            attention, loss, loss_chunk and recompute.

    Raises:
        WeightsError: config.json or the weights do not exist; gptjax does not implement the model;
            a tensor does not fit config.json.
        ValueError: a wrong option.
    """
    padding = {} if padded_vocab_size is None else {"padded_vocab_size": padded_vocab_size}
    return cast(GPT2 | Llama3, _load(hf, path, precision, options, padding))


def load_llmc(path: str | os.PathLike, *, precision: Precision = FP32, **options: Any) -> GPT2:
    """Load a checkpoint that llm.c, llm.c's train_gpt2.py or `save_llmc` wrote.

    bf16 tensors are converted to fp32.

    Args:
        path: the `.bin` file.
        precision: precision of the model. The parameters are fp32 in every precision.
        **options: other fields of `GPT2Config` that the file does not determine: attention, loss,
            loss_chunk, recompute.

    Raises:
        WeightsError: the file is not an llm.c checkpoint, or is too short or too long.
        ValueError: a wrong option.
    """
    return cast(GPT2, _load(llmc, path, precision, options, {}))


def _load(format: Any, path: str | os.PathLike, precision: Any, options: dict, more: dict) -> Model:
    source = sources.file_source(Path(path), format)
    config = dataclasses.replace(source.config(precision=precision, **options), **more)
    return model_from_params(config, source.read(config))


def _tokenizer(name: str | os.PathLike | None, vocab_size: int) -> AnyTokenizer | None:
    if name is None:
        return None
    ids = TOKENIZERS[name].vocab_size if name in TOKENIZERS else 0
    try:
        tokenizer = get_tokenizer(name) if ids <= vocab_size else None
    except TokenizerUnavailable as error:
        raise TokenizerUnavailable(f"{error}; or load no tokenizer: tokenizer=None") from error
    ids = tokenizer.vocab_size if tokenizer else ids
    if ids > vocab_size:
        raise WeightsError(
            f"load: expected a model of at least the {ids} ids of the tokenizer {name}, found a "
            f"vocabulary of {vocab_size}"
        )
    return tokenizer
