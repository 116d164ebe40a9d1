"""The ideas of the speedrun's model, each with what leaves it out; used by speedrun.py.

An idea is left out by fields of the config, by a parameter that keeps a neutral value, or by a
function of `gptjax.models.speedrun` that is replaced while the step is traced. The model's file has
no switches for this purpose.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import PyTree

from gptjax.models import speedrun
from gptjax.models.speedrun import Speedrun, SpeedrunConfig


@dataclasses.dataclass(frozen=True)
class Idea:
    """What leaves one idea out.

    Attributes:
        model: maps the model's config to the fields that change.
        stage: fields of the model's stage.
        values: parameter → value that it keeps.
        functions: name in `gptjax.models.speedrun` → function in its place.
        rounded: names of the parameters that are rounded to bf16 after each update.
    """

    name: str
    model: Callable[[SpeedrunConfig], Mapping[str, Any]] = lambda config: {}
    stage: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    functions: Mapping[str, Callable] = dataclasses.field(default_factory=dict)
    rounded: Sequence[str] = ()

    def without(self, config: SpeedrunConfig) -> SpeedrunConfig:
        """Return the config without the idea."""
        stage = config.stage._replace(**self.stage)
        return dataclasses.replace(config, **self.model(config), stage=stage)

    def start(self, params: PyTree) -> PyTree:
        """Return the parameters with the neutral values."""
        neutral = {name: jnp.full_like(params[name], value) for name, value in self.values.items()}
        return params | neutral

    def hold(self, tx: optax.GradientTransformation) -> optax.GradientTransformation:
        """Return the optimizer, which then leaves the parameters of `values` unchanged, and rounds
        those of `rounded`."""

        def update(grads, state, params=None):
            updates, state = tx.update(grads, state, params)
            for name in self.rounded:
                new = jax.lax.reduce_precision(params[name] + updates[name], 8, 7)
                updates = updates | {name: new - params[name]}
            return updates | {name: jnp.zeros_like(updates[name]) for name in self.values}, state

        return optax.GradientTransformation(tx.init, update)


@contextlib.contextmanager
def replaced(functions: Mapping[str, Callable]) -> Iterator[None]:
    """Replace functions of `gptjax.models.speedrun`, such as "smear" or "Speedrun.inputs"."""
    with contextlib.ExitStack() as stack:
        for path, function in functions.items():
            *owner, name = path.split(".")
            where = functools.reduce(getattr, owner, speedrun)
            stack.callback(setattr, where, name, getattr(where, name))
            setattr(where, name, function)
        yield


# --------------------------------------------------------- functions in place of those of the model


def _without_bigram(self, tokens_BT, inputs=Speedrun.inputs):
    x0_BTC, bigram_BTC = inputs(self, tokens_BT)
    return x0_BTC, jnp.zeros_like(bigram_BTC)


def _without_values(config, i, x_BTC, layer, tokens_BT, segments_BT, attention=speedrun.attention):
    layer = layer._replace(value_PC=None, value_gate_HG=None)
    return attention(config, i, x_BTC, layer, tokens_BT, segments_BT)


def _all_frequencies(config):
    return (1 / 1024) ** np.linspace(0, 1, config.head_dim // 2), 0.1


def one_lane(self, tokens_BT, cache=None, segment_ids_BT=None):
    """`Speedrun.hidden` where the MLPs of all layers read lane 0."""
    c, layers = self.config, self.layers()
    add = functools.partial(speedrun.weighted_sum, c.precision.residual_dtype)
    x0, bigram = self.inputs(tokens_BT)
    scalars = functools.partial(speedrun.scalars, dtype=c.precision.compute_dtype)
    residual, to_lanes = scalars(self.residual_lambdas, 2), scalars(self.lane_lambdas, 4)
    x0_lambdas, bigram_lambdas = scalars(self.x0_lambdas, 1), scalars(self.bigram_lambdas, 1)
    (mlp_lambdas,) = scalars(self.mlp_lambdas, c.lanes_from)
    one = jnp.ones((), jnp.float32)
    weights = [(one, weight) for weight in mlp_lambdas] + [(w[0], w[2]) for w in to_lanes]

    lane, skip, early = add((1, x0), (*bigram_lambdas[0], bigram)), None, None
    for i, (of_attention, of_mlp) in enumerate(weights):
        injection = ((*x0_lambdas[i], x0), *([(*bigram_lambdas[i], bigram)] if i else []))
        if i == c.skip[1]:
            lane = add((1, lane), (1, skip))
        else:
            y = speedrun.attention(c, i, lane, layers[i], tokens_BT, segment_ids_BT)
            lane = add((residual[i][0], lane), (of_attention, y), *injection)
        if i == c.skip[0]:
            weight = 2 * jax.nn.sigmoid(self.skip_lambda[...])
            skip = add((weight * speedrun.gate(c, x0, self.skip_gate[...][None]), lane))
        lane = add((residual[i][1], lane), (of_mlp, speedrun.mlp(c, lane, layers[i])))
        early = lane if i == c.lanes_from else early
    return speedrun.norm(c, add((1, lane), (-self.backout_lambda[...], early)))


ALL = Idea("all ideas")
# The same run again: with two parts, on the second GPU.
AGAIN = Idea("all ideas, again")
# Tables that an idea alone uses are nearly left out: an update of zeros takes time, too.
IDEAS: Sequence[Idea] = (
    ALL,
    Idea("smear", functions={"smear": lambda config, x_BTC, w_G, strength: x_BTC}),
    Idea(
        "bigram embedding",
        model=lambda config: {"bigram_rows": 2},
        functions={"Speedrun.inputs": _without_bigram},
    ),
    Idea(
        "value embeddings",
        model=lambda config: {"value_layers": config.value_layers[:1]},
        functions={"attention": _without_values},
    ),
    Idea("second lane", functions={"Speedrun.hidden": one_lane}),
    Idea("skip connection", values={"skip_lambda": -100.0}),
    Idea("paired heads", model=lambda config: {"paired_layers": ()}),
    Idea("key offset", functions={"partial_key_offset": lambda k_BTHD: k_BTHD}),
    AGAIN,
    Idea("backout", values={"backout_lambda": 0.0}),
    Idea("multi-token prediction", stage={"token_weights": (1.0,), "final_token_weights": None}),
    Idea("attention gates", values={"attention_gates": 0.0}),
    Idea("half rotary", functions={"rotary": _all_frequencies}),
    Idea("tying", stage={"tied": False}),
    Idea("x0 injection", values={"x0_lambdas": 0.0}),
    # As the record stores them.
    Idea(
        "lower 16 bits of AdamW's parameters",
        rounded=("embed", "lm_head", "values", "bigram", "attention_gates", "value_gates")
        + ("smear_gate", "skip_gate"),
    ),
)
