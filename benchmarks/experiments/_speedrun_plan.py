"""The configs of speedrun.py: the record's stages in proportion, and what is tried."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from _speedrun_ideas import Idea

from gptjax import cli
from gptjax.config import Config, ConfigError
from gptjax.optim import OptimizerConfig
from gptjax.timeline import Timeline

NAMES = ("adamw", "normuon", "speedrun")


def scaled(config: Config, tokens: int, batch_tokens: int, sequence_length: int) -> Config:
    """Return the config with its stages in proportion, for a run of `tokens` tokens.

    Batches keep their ratios, rounded to whole sequences, with a mean of about `batch_tokens` over
    the steps. Steps, also those of the optimizer's options, are multiplied by one factor, and
    rounded to whole periods of AdamW; a stage without a step is left out. The stage with the
    smallest batch makes the number of tokens exact.

    Raises:
        ConfigError: `tokens` is not a whole number of the smallest batch, or too few.
    """
    spans, every = Timeline(config).spans, getattr(config.optimizer, "adam_every", 1)
    before = np.array([span.end - span.begin for span in spans])
    batches = np.array([span.config.batch_tokens for span in spans])
    share = batch_tokens * before.sum() / (before @ batches) / sequence_length
    batches = np.maximum(1, np.rint(batches * share).astype(int)) * sequence_length
    factor = tokens / (before @ batches)
    steps = every * np.rint(before * factor / every).astype(int)
    smallest = int(np.argmin(batches))
    more, rest = divmod(tokens - int(steps @ batches), int(batches[smallest]))
    steps[smallest] += more
    if rest or steps[smallest] < 1:
        raise ConfigError(
            f"expected a number of tokens that is a multiple of {batches[smallest]}, and enough "
            f"for the {len(spans)} stages of {config.name}, got {tokens}"
        )
    kept = [i for i, count in enumerate(steps) if count]
    ends, begin, own = np.cumsum(steps).tolist(), 0, []
    for i in kept:
        stage, batch = config.stages[i], int(batches[i])
        of_model = spans[i].config.model.stage._replace(steps=(begin, ends[i]))
        changed = {"until": ends[i], "batch_tokens": batch, "sequence_length": None}
        changed |= {"micro_batch": batch // sequence_length}
        own.append(dataclasses.replace(stage, model={**stage.model, "stage": of_model}, **changed))
        begin = ends[i]
    return dataclasses.replace(
        config,
        max_steps=ends[-1],
        stages=tuple(own),
        sequence_length=sequence_length,
        batch_tokens=own[0].batch_tokens,
        micro_batch=own[0].micro_batch,
        optimizer=with_steps(config.optimizer, factor),
    )


def with_steps(optimizer: OptimizerConfig, factor: float) -> OptimizerConfig:
    """Return the options with their numbers of steps multiplied by a factor."""
    names = [f.name for f in dataclasses.fields(optimizer) if f.name.endswith("_steps")]
    known = {name: getattr(optimizer, name) for name in names}
    counts = {name: round(n * factor) for name, n in known.items() if n is not None}
    return dataclasses.replace(optimizer, **counts)


def config_of(o: Any, name: str, rate: float, seed: int, cut: bool = False) -> Config:
    """Return the config of a compared run.

    Args:
        rate: AdamW's learning rate, or that of the matrices.
        cut: with the maximum document lengths of the stages; without, documents are whole.
    """
    config = dataclasses.replace(
        cli.load(getattr(o, name)), dataset=o.dataset, data_dir=o.data_dir, seed=seed
    )
    config = dataclasses.replace(config, sample_every=0, device=o.device)
    if name == "speedrun":
        config = scaled(config, o.tokens, o.batch_tokens, o.long_sequence)
        optimizer = config.optimizer
        factor = rate / optimizer.matrix_learning_rate
        rates = {"learning_rate": optimizer.learning_rate * factor, "matrix_learning_rate": rate}
        config = with_optimizer(config, **rates, param_storage="fp32")
        config = dataclasses.replace(config, data_order=o.data_order)
        return config if cut else without_cuts(config)
    steps, rest = divmod(o.tokens, o.batch_tokens)
    if rest:
        raise ConfigError(f"--tokens {o.tokens}: expected a multiple of {o.batch_tokens}")
    config = dataclasses.replace(
        config,
        max_steps=steps,
        sequence_length=o.sequence_length,
        batch_tokens=o.batch_tokens,
        micro_batch=o.micro_batch,
    )
    warmup = round(o.warmups[NAMES.index(name)] * steps)
    schedule = {"schedule": "linear", "warmup_steps": warmup, "schedule_steps": None}
    schedule |= {"final_fraction": 0.0, "learning_rate": rate}
    if name == "normuon":
        schedule |= {"learning_rate": o.rest * rate, "matrix_learning_rate": rate}
        # Of modded-nanogpt's record: 300 and 50 of 1,490 steps.
        schedule |= {"momentum_warmup_steps": round(0.2 * steps)}
        schedule |= {"momentum_cooldown_steps": round(0.03 * steps)}
    return with_optimizer(config, **schedule)


def with_optimizer(config: Config, **options: Any) -> Config:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, **options))


def without_cuts(config: Config) -> Config:
    """Return the config with whole documents."""
    whole = tuple(dataclasses.replace(s, max_document_length=None) for s in config.stages)
    return dataclasses.replace(config, max_document_length=None, stages=whole)


def with_sequences(config: Config, length: int) -> Config:
    """Return the config with sequences of another length, and as many tokens a step."""
    stages = tuple(
        dataclasses.replace(stage, micro_batch=stage.batch_tokens // length)
        for stage in config.stages
    )
    micro_batch = config.batch_tokens // length
    changed = {"sequence_length": length, "micro_batch": micro_batch, "stages": stages}
    return dataclasses.replace(config, **changed)


def ablated(o: Any, idea: Idea, rate: float) -> Config:
    """Return the config of a run of one stage without an idea.

    Its windows and rotary embedding are those of the last stage, without rescaling. It is tied, and
    predicts as many tokens as the first stage, with weights that fall to 0 at the end.
    """
    config = config_of(dataclasses.replace(o, tokens=o.ablate_tokens), "speedrun", rate, 0)
    first, last = (Timeline(config).spans[i].config.model.stage for i in (0, -1))
    steps = o.ablate_tokens // o.batch_tokens
    weights = first.token_weights
    stage = last._replace(token_weights=weights, tied=True, rotary_windows=(last.long_window,))
    stage = stage._replace(final_token_weights=(1.0, *[0.0] * (len(weights) - 1)), steps=(0, steps))
    model = idea.without(dataclasses.replace(config.model, stage=stage))
    return dataclasses.replace(
        config,
        optimizer=with_steps(config.optimizer, steps / config.max_steps),
        max_steps=steps,
        stages=(),
        model=model,
        batch_tokens=o.batch_tokens,
        micro_batch=o.batch_tokens // o.long_sequence,
    )


def rates_to_try(tried: dict[float, float], rates: Sequence[float]) -> list[float]:
    """Return the learning rates without a loss yet: those given, then one beyond the best.

    Args:
        tried: learning rate → final loss.
        rates: the learning rates that were given.
    """
    missing = [rate for rate in rates if rate not in tried]
    if missing or len(rates) < 2 or len(tried) > len(rates):
        return missing
    best = min(tried, key=tried.get)
    return {min(rates): [best / 2], max(rates): [2 * best]}.get(best, [])
