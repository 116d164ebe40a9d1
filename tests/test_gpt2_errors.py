"""Arguments that GPT2, loss_fn and GPT2Config refuse."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from flax import nnx
from gpt2_tools import SHAPES, config_of, split

from gptjax import GPT2, GPT2Config, loss_fn


def test_a_sequence_longer_than_the_block():
    model, tokens = nnx.merge(*split(config_of(SHAPES["odd"]))), jnp.zeros((1, 8), jnp.int32)
    for call in (model, lambda tokens: loss_fn(model, tokens, tokens)):
        with pytest.raises(ValueError, match="a sequence of 8 tokens is longer than block_size=7"):
            call(tokens)


@pytest.fixture
def unchecked_types():
    """Without jaxtyping and beartype, which under pytest refuse wrong types before the code itself
    does."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "tokens, got",
    [
        (jnp.arange(3), r"\(3,\) in int32"),
        (jnp.zeros((1, 3)), r"\(1, 3\) in float32"),
        (jnp.ones((1, 3), bool), r"\(1, 3\) in bool"),
        ([[1, 2]], "a list"),
        (None, "a NoneType"),
    ],
)
def test_tokens_that_are_no_ids(unchecked_types, tokens, got):
    model = nnx.merge(*split(config_of(SHAPES["odd"])))
    with pytest.raises(
        ValueError,
        match=rf"GPT2: expected an array of integer ids of shape \(batch, time\).*got {got}",
    ):
        model(tokens)
    for pair in ((tokens, jnp.ones((1, 3), int)), (jnp.ones((1, 3), int), tokens)):
        with pytest.raises(
            ValueError, match=rf"loss_fn: expected an array of integer ids .*got {got}"
        ):
            loss_fn(model, *pair)


def test_other_arguments_of_a_wrong_type_or_shape(unchecked_types):
    config = config_of(SHAPES["odd"])
    with pytest.raises(TypeError, match=r"GPT2: expected rngs=flax.nnx.Rngs\(seed\), got a int"):
        GPT2(config, rngs=0)
    with pytest.raises(TypeError, match="GPT2: expected a gptjax.GPT2Config, got a dict"):
        GPT2(vars(config), rngs=nnx.Rngs(0))
    tokens, targets = jnp.zeros((4, 5), jnp.int32), jnp.zeros((5, 4), jnp.int32)
    with pytest.raises(ValueError, match=r"got tokens \(4, 5\) and targets \(5, 4\)"):
        loss_fn(nnx.merge(*split(config)), tokens, targets)


@pytest.mark.parametrize("value", [True, 2.0, "2", np.int64(2), None, 0, -1])
@pytest.mark.parametrize(
    "name",
    ["vocab_size", "padded_vocab_size", "block_size", "n_layer", "n_head", "n_embd", "loss_chunk"],
)
def test_sizes_are_whole_numbers(unchecked_types, name, value):
    if value is None and name in ("padded_vocab_size", "loss_chunk"):
        return
    with pytest.raises(
        ValueError,
        match=f"GPT2Config: {name} must be an int of at least 1, got .*{type(value).__name__}",
    ):
        GPT2Config(**{name: value})


def test_padding_is_the_next_multiple_of_128():
    for vocab, rows in (
        (1, 128),
        (128, 128),
        (256, 256),
        (257, 384),
        (50257, 50304),
        (65536, 65536),
    ):
        assert GPT2Config(vocab_size=vocab).padded_vocab_size == rows
    config = GPT2Config(vocab_size=250, block_size=8, n_layer=2, n_head=1, n_embd=4)
    allocated = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(split(config)[1]))
    assert config.num_allocated_params == allocated == config.num_params + 6 * 4
    assert (
        GPT2Config() == GPT2Config(padded_vocab_size=50304)
        and GPT2Config().num_allocated_params == 124_475_904
    )


def test_sizes_that_contradict_each_other_are_refused():
    for message, fields in {
        "n_embd=770 is not a multiple of n_head=12": {"n_embd": 770},
        "padded_vocab_size=50256 is below vocab_size=50257": {"padded_vocab_size": 50256},
    }.items():
        with pytest.raises(ValueError, match=message):
            GPT2Config(**fields)
    # The 50,304 rows of a config whose vocabulary alone was changed.
    message = (
        r"at most 1023 rows of padding, got padded_vocab_size=50304 for vocab_size=256; "
        r"give padded_vocab_size=256"
    )
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(GPT2Config(), vocab_size=256)
    smaller = dataclasses.replace(GPT2Config(), vocab_size=256, padded_vocab_size=None)
    assert smaller == GPT2Config(vocab_size=256) == dataclasses.replace(smaller, n_layer=12)


def test_unknown_options_list_the_choices():
    # The type itself refuses under pytest; without the checker __post_init__ does.
    with pytest.raises((ValueError, TypeError), match="(?s)block.*sublayer"):
        GPT2Config(recompute="everything")
    with pytest.raises((ValueError, TypeError), match="precision"):
        GPT2Config(precision="bf16")
    tokens = jnp.zeros((1, 3), jnp.int32)
    for options, message in [
        ({"attention": "flash"}, r"flash_attention: unknown implementation 'flash'; choose one of"),
        ({"loss": "sparse"}, r"unknown implementation 'sparse'; choose one of \['auto'"),
        ({"loss_chunk": 4}, "3 tokens are not a multiple of chunk=4"),
    ]:
        graph, params = split(config_of(SHAPES["odd"], **options))
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(lambda p, g=graph: loss_fn(nnx.merge(g, p), tokens, tokens), params)
