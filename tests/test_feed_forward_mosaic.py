"""The Mosaic back end of pallas_kernels.linear_gelu, linear_relu_squared and mlp: in JAX's
interpreter for Mosaic GPU, lowered for an H200, and on a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from feed_forward_tools import check_all, check_mlp, inputs, loss, mlp_inputs
from kernel_tools import lower_for_h200

from pallas_kernels.feed_forward import linear_relu_squared, mlp


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles that a CPU can go through; the interpreter takes no left operand from registers."""
    from pallas_kernels.feed_forward import mosaic, mosaic_backward

    small = mosaic.Tiles(rows=64, columns=64, stages=2, slots=1)
    monkeypatch.setattr(mosaic, "FORWARD", (dataclasses.replace(small, cluster=2), small))
    backward = mosaic_backward.BackwardTiles(columns=64, stages=2, registers=False)
    monkeypatch.setattr(mosaic_backward, "BACKWARD", (backward,))


@pytest.mark.parametrize(
    "n, i, o, dtype, activation",
    [
        # pairs of blocks that share w; each warpgroup has several tiles
        (256, 128, 192, jnp.bfloat16, "gelu"),
        # single blocks, one step a tile, one warpgroup has more tiles than the other
        (384, 64, 64, jnp.float16, "relu_squared"),
    ],
)
def test_mosaic_on_a_cpu(mosaic_on_cpu, small_tiles, n, i, o, dtype, activation):
    check_all("mosaic", (n,), i, o, dtype, activation)


@pytest.mark.parametrize(
    "n, i, o, c, rows, columns, slots, dtype",
    [
        # pairs of blocks that share w2; each warpgroup has several tiles
        (256, 128, 192, 64, 64, 64, 1, jnp.bfloat16),
        # single blocks, two parts a tile through one slot
        (192, 64, 256, 128, 64, 128, 1, jnp.bfloat16),
        (128, 64, 384, 64, 64, 192, 1, jnp.float16),  # three parts
        (128, 64, 1280, 64, 64, 192, 1, jnp.bfloat16),  # the last tile is cut
        (256, 64, 1344, 64, 128, 128, 2, jnp.bfloat16),  # and its parts go through two slots
        # the same warpgroup goes on with another tile
        (512, 64, 448, 64, 128, 192, 2, jnp.bfloat16),
    ],
)
def test_mosaic_mlp_on_a_cpu(
    mosaic_on_cpu, small_tiles, monkeypatch, n, i, o, c, rows, columns, slots, dtype
):
    from pallas_kernels.feed_forward import mosaic

    sizes = {"rows": rows, "columns": columns, "slots": slots}
    forward = tuple(dataclasses.replace(tiles, **sizes) for tiles in mosaic.FORWARD)
    monkeypatch.setattr(mosaic, "FORWARD", forward)
    monkeypatch.setattr(mosaic, "MOST_WASTED", 0.5)
    check_mlp("mosaic", n, i, o, c, dtype)


@pytest.mark.parametrize(
    "n, o, columns",
    [
        (256, 3072, 192),
        (256, 4096, 192),
        (256, 6400, 192),
        (128, 4096, 128),
        (256, 256, 128),
        (256, 320, None),
    ],
)
def test_tiles_for_a_width(n, o, columns):
    """192 columns, up to 5 % of them past the end; else 128, which must divide O."""
    from pallas_kernels.feed_forward import mosaic

    tiles = mosaic.forward_tiles(n, 64, o)
    assert (tiles and tiles.columns) == columns


def test_slots_that_the_next_tile_would_find_taken():
    from pallas_kernels.feed_forward import mosaic

    with pytest.raises(ValueError, match="2 slots do not divide the 1 parts of a column"):
        mosaic.Tiles(rows=64, columns=192)


def test_mosaic_mlp_without_gradients_saves_nothing(mosaic_on_cpu, small_tiles, monkeypatch):
    from pallas_kernels.feed_forward import mosaic

    saved, forward = [], mosaic.forward
    monkeypatch.setattr(
        mosaic, "forward", lambda *a, save: saved.append(save) or forward(*a, save=save)
    )
    args = mlp_inputs(64, 64, 64, 64, jnp.bfloat16)
    f = functools.partial(mlp, implementation="mosaic")
    jax.eval_shape(f, *args)
    assert saved == [False]
    jax.eval_shape(jax.grad(lambda *args: f(*args).astype(jnp.float32).sum()), *args)
    assert saved[-1] is True


def test_mlp_for_any_width_of_its_result():
    """No tiles divide 96: the gradient of the second product is XLA's, and linear_gelu's kernel
    goes on from there."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((256, 768), (768, 3072), (3072,), (3072, 96))
    ]
    gradients = jax.grad(
        lambda *args: mlp(*args, implementation="mosaic").astype(jnp.float32).sum(), (0, 1, 2, 3)
    )
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == 2


# No tiles of linear_gelu's own backward pass divide 1600.
@pytest.mark.parametrize("width, kernels", [(768, 2), (1024, 2), (1280, 2), (1600, 1)])
def test_gpt2_widths_lower_for_an_h200(width, kernels):
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16)
        for s in ((4096, width), (width, 4 * width), (4 * width,))
    ]
    gradients = jax.grad(functools.partial(loss, implementation="mosaic"), (0, 1, 2))
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == kernels
    gradients = jax.grad(
        lambda *args: mlp(*args, implementation="mosaic").astype(jnp.float32).sum(), (0, 1, 2, 3)
    )
    shapes.append(jax.ShapeDtypeStruct((4 * width, width), jnp.bfloat16))
    assert lower_for_h200(gradients, *shapes).count("custom_call @mosaic_gpu") == 2


# ---------------------------------------------------------------------------------------------- GPU


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o", [(4096, 768, 3072), (768, 1600, 6400), (256, 256, 384)])
def test_mosaic_mlp_on_a_gpu(n, i, o):
    check_mlp("mosaic", n, i, o, i, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("n, i, o", [(16384, 768, 3072), (8192, 1280, 5120)])
def test_mosaic_mlp_over_many_tiles_and_again(n, i, o):
    """Every block has a dozen tiles or more, and what is left of a race shows as a difference
    between runs."""
    args = mlp_inputs(n, i, o, i, jnp.bfloat16)

    def gradients(implementation):
        y, pull = jax.vjp(functools.partial(mlp, implementation=implementation), *args)
        return y, *pull(y)

    f = jax.jit(gradients, static_argnums=0)
    found = f("mosaic")
    for ours, theirs in zip(found, f("xla"), strict=True):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.abs(ours - theirs).max() <= 2**-7 * jnp.abs(theirs).max()
        assert jnp.sqrt(jnp.mean((ours - theirs) ** 2)) <= 2**-7 * jnp.sqrt(jnp.mean(theirs**2))
    for _ in range(5):
        for one, other in zip(f("mosaic"), found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [True, False])
def test_mosaic_over_many_tiles(bias):
    """Every block has a dozen tiles: an operand overwritten too early shows in one of them."""
    x, w, b = inputs((16384,), 768, 3072, jnp.bfloat16)

    def gradients(implementation):
        f = lambda x, w: linear_relu_squared(
            x, w, b if bias else None, implementation=implementation
        )
        y, pull = jax.vjp(f, x, w)
        return y, *pull(y)

    for ours, theirs in zip(
        jax.jit(gradients, static_argnums=0)("mosaic"), gradients("xla"), strict=True
    ):
        ours, theirs = ours.astype(jnp.float32), theirs.astype(jnp.float32)
        assert jnp.abs(ours - theirs).max() <= 2**-7 * jnp.abs(theirs).max()
        assert jnp.sqrt(jnp.mean((ours - theirs) ** 2)) <= 2**-7 * jnp.sqrt(jnp.mean(theirs**2))
