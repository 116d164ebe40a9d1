"""The optimizer that a config describes, and what it does with each parameter, in words."""

import dataclasses
from collections.abc import Mapping

import jax
import optax
from jax.sharding import Mesh

from gptjax import optim
from gptjax.config import Config
from gptjax.models.gpt2 import PARAMETER_GROUPS
from gptjax.optim.groups import describe, matrices_and_adamw
from gptjax.training.step import init_state


def schedules(config: Config) -> dict[str, optax.Schedule]:
    """What changes in the course of a run, as functions of the update's index: AdamW's
    learning_rate; the matrix_learning_rate of NorMuon and Muon; NorMuon's matrix_weight_decay and
    momentum."""
    o = config.optimizer
    matrix_rate = config.learning_rate_schedule(peak=o.matrix_learning_rate)
    squared = o.matrix_decay_form == "lr_squared"
    return {
        "learning_rate": config.learning_rate_schedule(),
        "matrix_learning_rate": matrix_rate,
        "matrix_weight_decay": lambda count: (
            o.matrix_weight_decay * (matrix_rate(count) if squared else 1.0)
        ),
        "momentum": optim.momentum_schedule(
            o.schedule_steps or config.max_steps,
            low=o.momentum_low,
            high=o.momentum,
            warmup_steps=o.momentum_warmup_steps,
            cooldown_steps=o.momentum_cooldown_steps,
        ),
    }


def parameter_groups(config: Config) -> tuple[optim.Group, ...]:
    """GPT-2's groups, with the betas that the config gives them."""
    o = config.optimizer
    own = {
        "wte|wpe": (o.embedding_b1, o.embedding_b2),
        r".*\.(bias|scale)": (o.vector_b1, o.vector_b2),
    }
    return tuple(
        dataclasses.replace(group, b1=own[group.paths][0], b2=own[group.paths][1])
        if group.matrices is None
        else group
        for group in PARAMETER_GROUPS
    )


def build(
    config: Config, mesh: Mesh, changing: Mapping[str, optax.Schedule] | None = None
) -> optax.GradientTransformation:
    """The transformation of a run: clip, optimizer, learning rate and decay.

    Args:
        mesh: the devices of the run; NorMuon shares its matrices out among them.
        changing: in place of `schedules(config)`; what they look up may be an argument of the
            compiled program, so that one program serves runs of any learning rate and length.
    """
    o, changing = config.optimizer, changing or schedules(config)
    adam = {
        "learning_rate": changing["learning_rate"],
        "weight_decay": o.weight_decay,
        "b1": o.b1,
        "b2": o.b2,
        "eps": o.eps,
        "clip_norm": o.clip_norm,
    }
    if o.algorithm == "adamw":
        return optim.adamw(**adam)

    adam["every"], groups = o.adam_every, parameter_groups(config)
    if o.algorithm == "muon":
        # Its own Adam would be another: with Nesterov momentum, and with decay for all.
        whole = optax.contrib.MuonDimensionNumbers(0, 1)
        muon = optax.contrib.muon(
            changing["matrix_learning_rate"],
            beta=o.momentum,
            weight_decay=o.matrix_weight_decay,
            muon_weight_dimension_numbers=lambda params: jax.tree.map(lambda _: whole, params),
        )
        return matrices_and_adamw(groups, muon, **adam)
    return optim.normuon_and_adamw(
        groups,
        matrix_learning_rate=changing["matrix_learning_rate"],
        matrix_weight_decay=changing["matrix_weight_decay"],
        momentum=changing["momentum"],
        neuron_b2=o.neuron_b2,
        method=optim.distributed(getattr(optim, o.orthogonalization), mesh),
        **adam,
    )


def lines(config: Config) -> list[str]:
    """What the header says of the optimizer: a line, and for NorMuon and Muon a table of the
    parameters."""
    o = config.optimizer
    adam = f"lr {o.learning_rate:g}, decay {o.weight_decay:g}"
    if o.algorithm == "adamw":
        return [f"adamw: {adam} (of tensors with two or more axes)"]
    params = jax.eval_shape(lambda: init_state(config.model, optax.identity(), config.seed)).params
    rate, decay = o.matrix_learning_rate, o.matrix_weight_decay
    rows = [("parameter", "shape", "optimizer", "lr", "decay")]
    for path, shape, kind, rate_factor, decay_factor in describe(PARAMETER_GROUPS, params):
        of_adam = kind == "adamw"
        kind = kind if of_adam or o.algorithm == "normuon" else "muon"
        rows.append(
            (
                path,
                shape,
                kind,
                f"{(o.learning_rate if of_adam else rate) * rate_factor:g}",
                f"{(o.weight_decay if of_adam else decay) * decay_factor:g}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(5)]
    form = (
        ", decay goes as lr²"
        if o.algorithm == "normuon" and o.matrix_decay_form == "lr_squared"
        else ""
    )
    how = f", {o.orthogonalization}" if o.algorithm == "normuon" else ", newton_schulz"
    betas = {
        "embeddings": (o.embedding_b1, o.embedding_b2),
        "norms and biases": (o.vector_b1, o.vector_b2),
    }
    rest = [f"every {o.adam_every} steps, gradients summed"] if o.adam_every > 1 else []
    for name, (b1, b2) in betas.items():
        if (b1, b2) != (None, None):
            rest.append(
                f"{name} b1 {o.b1 if b1 is None else b1:g}, b2 {o.b2 if b2 is None else b2:g}"
            )
    adam = f"; adamw: {'; '.join(rest)}" if rest else ""
    return [f"{o.algorithm}{how}{form}{adam}"] + [
        "  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
