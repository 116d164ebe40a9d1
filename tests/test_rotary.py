"""pallas_kernels.rotary_qkv against its definition, by the 2× rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_tools import lower_for_h200, on_gpu, unchecked
from rule_tools import check

from pallas_kernels import rotary_qkv, select
from pallas_kernels.rotary import Options, reference

DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16]
NORM = {"eps": 1e-6}
# B, T, H, G, D, E, options
CASES = {
    "speedrun": (2, 19, 4, 4, 16, 4, NORM),
    "speedrun, paired": (2, 19, 4, 4, 16, 4, NORM | {"pair_heads": True}),
    "llama": (1, 21, 6, 2, 8, 4, {"pairs": "halves"}),
    "a norm, all channels, batch of angles": (3, 7, 2, 2, 8, 4, NORM | {"pairs": "halves"}),
    "one token and angle": (1, 1, 1, 1, 2, 1, {}),
    "paired groups": (1, 5, 4, 2, 8, 2, {"pair_heads": True, "pairs": "halves"}),
}


def arrays(b, t, h, g, d, e, dtype, tables=1, times=1):
    rng = np.random.default_rng(0)
    angle = rng.uniform(-9, 9, (tables, times * t, e))
    qkv = jnp.asarray(rng.standard_normal((b, t, (h + 2 * g) * d)), dtype)
    return qkv, jnp.asarray(np.cos(angle), jnp.float32), jnp.asarray(np.sin(angle), jnp.float32)


RULE_CASES = [
    *(("triton", case, jnp.float32) for case in CASES.values()),
    # The dtype changes loads and stores alone: all dtypes for one case of each layout of pairs.
    *(
        (back_end, CASES[name], dtype)
        for name in ("speedrun, paired", "llama")
        for back_end, dtype in (*(("triton", d) for d in DTYPES[1:]), ("xla", jnp.bfloat16))
    ),
    *on_gpu(
        *(("triton", case, jnp.bfloat16) for case in CASES.values()),
        *(
            ("triton", case, dtype)
            for case in (
                (1, 4096, 6, 6, 128, 32, NORM | {"pair_heads": True}),
                (3, 1000, 32, 8, 64, 32, {"pairs": "halves"}),
            )
            for dtype in DTYPES[:2]
        ),
    ),
]


@pytest.mark.parametrize("back_end, case, dtype", RULE_CASES, ids=str)
def test_output_and_gradient(back_end, case, dtype, interpreter):
    b, t, h, g, d, e, how = case
    times = 2 if "pair_heads" in how else 1
    qkv, cos, sin = arrays(b, t, h, g, d, e, dtype, tables=b, times=times)
    options = Options(h, g, **how)

    def ours(qkv):
        how_called = {"heads": h, "key_heads": g, "implementation": back_end}
        return rotary_qkv(qkv, cos, sin, **how, **how_called)

    def plain(qkv):
        """Each of the two operations rounds to the dtype."""
        x = qkv.reshape(b, t, -1, d)
        if "eps" in how:
            x32 = x.astype(jnp.float32)
            normed = x32 * jax.lax.rsqrt((x32**2).mean(-1, keepdims=True) + how["eps"])
            x = jnp.concatenate([normed.astype(dtype)[:, :, : h + g], x[:, :, h + g :]], axis=2)
        without = Options(h, g, options.pairs, None, options.pair_heads)
        results = reference(x.reshape(qkv.shape), cos, sin, without)
        return tuple(x.astype(dtype) for x in results)

    check(ours, plain, lambda qkv: reference(qkv, cos, sin, options), (qkv,))


def test_reference_is_the_definition():
    """Every result, one number at a time."""
    b, t, h, g, d, e = 1, 3, 4, 2, 8, 2
    qkv, cos, sin = arrays(b, t, h, g, d, e, jnp.float32, times=2)
    rows = np.asarray(qkv, np.float64).reshape(t, h + 2 * g, d)
    for pairs in ("adjacent", "halves"):
        options = Options(h, g, pairs, 0.5, True)
        found = reference(qkv, cos, sin, options)
        expected = [np.zeros((1, 2 * t, n // 2, d)) for n in (h, g, g)]
        for time in range(t):
            heads = [(result, head) for result, n in enumerate((h, g, g)) for head in range(n)]
            for i, (result, head) in enumerate(heads):
                # The angle is that of the head's parity, the place that of its half.
                x, angle = rows[time, i].copy(), 2 * time + head % 2
                half, slot = divmod(head, expected[result].shape[2])
                if result < 2:
                    x /= np.sqrt((x**2).mean() + 0.5)
                    for pair in range(e):
                        at = (2 * pair, 2 * pair + 1) if pairs == "adjacent" else (pair, e + pair)
                        turn = complex(cos[0, angle, pair], sin[0, angle, pair])
                        turned = complex(*x[list(at)]) * turn
                        x[list(at)] = turned.real, turned.imag
                expected[result][0, 2 * time + half, slot] = x
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_lowers_for_an_h200():
    """One launch each way."""
    qkv, cos, sin = arrays(2, 64, 4, 2, 16, 4, jnp.bfloat16)
    call = lambda qkv: rotary_qkv(qkv, cos, sin, heads=4, key_heads=2)[0].astype(jnp.float32).sum()
    text = lower_for_h200(jax.value_and_grad(call), qkv)
    assert text.count("@rotary_forward_kernel") == text.count("@rotary_backward_kernel") == 1
    assert select("rotary_qkv", head_dim=128, angles=32) == "xla"


def test_errors(triton_on_cpu):
    qkv, cos, sin = arrays(2, 4, 2, 2, 8, 2, jnp.float32)
    tiled = lambda *by: {"cos": jnp.tile(cos, by), "sin": jnp.tile(sin, by)}
    for changed, message in [
        *(({"heads": heads}, "a multiple of H") for heads in (0, 5)),
        ({"cos": cos[:, :3], "sin": sin[:, :3]}, "cos and sin"),
        (tiled(1, 1, 3), "D/2"),
        ({"cos": cos.astype(jnp.bfloat16)}, "bfloat16"),
        ({"pairs": "both"}, "'both'"),
        ({"eps": 0.0}, "eps > 0"),
        ({"cos": cos[0]}, r"cos and sin \(B or 1, T, E\), got"),
        ({"heads": 4, "key_heads": 1, "pair_heads": True} | tiled(1, 2, 1), "even numbers"),
    ]:
        with pytest.raises(ValueError, match=message):
            unchecked(rotary_qkv)(qkv, **({"heads": 2, "cos": cos, "sin": sin} | changed))
    qkv, cos, sin = arrays(2, 4, 2, 2, 24, 3, jnp.float32)
    with pytest.raises(ValueError, match="powers of two, not 24, 3 and 18"):
        rotary_qkv(qkv, cos, sin, heads=2, implementation="triton")
