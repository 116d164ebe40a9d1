"""The tiles of pallas_kernels.flash_attention's Triton back end, and its kernels compiled for
several GPUs."""

import copy

import jax
import jax.numpy as jnp
import pytest
import triton as triton_package
from attention_triton_tools import gradients, packed_gradients, set_tiles
from kernel_tools import triton_kernels


@pytest.mark.parametrize(
    "heads, t, together",
    [
        (48, 1024, 24),
        (384, 1024, 32),
        (33, 1024, 17),
        (5, 1024, 5),
        (1, 1024, 1),
        (3, 40_000, 1),
        (768, 700, 46),
    ],
)
def test_groups_of_heads_are_even(heads, t, together):
    """As few as may be of at most 32,768 rows, the last no more than a few heads smaller than the
    others."""
    from pallas_kernels.attention import triton

    tile = {"M": 64, "N": 64, "rows": 32768, "num_warps": 4, "num_stages": 3}
    found = triton._launched(tile, t, heads)
    assert found == {"M": 64, "N": 64, "num_warps": 4, "num_stages": 3, "TOGETHER": together}
    assert -(-heads // together) == -(-heads // max(1, 32768 // t))


def test_deterministic_is_split(monkeypatch):
    """The names are the only thing that a CPU can tell apart: its interpreter adds in one order."""
    set_tiles(monkeypatch, 64, 64, "fused")
    x = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    names = lambda deterministic: [
        k.name for k in triton_kernels(gradients(deterministic), x, x, x)
    ]
    assert names(True) == ["forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel"]
    assert names(False) == ["forward_kernel", "delta_kernel", "dkv_kernel", "convert_kernel"]


@pytest.mark.parametrize(
    "capability, listed",
    [
        ((8, 0), "8.0"),
        ((8, 6), "8.6"),
        ((8, 7), "8.0"),  # 163 KB, as much as 8.0
        ((8, 9), "8.6"),
        ((9, 0), "9.0"),
        ((10, 0), "9.0"),
        ((12, 0), "8.6"),  # 99 KB
        ((13, 0), "8.6"),  # unknown: the least
    ],
)
def test_tiles_of_every_gpu(capability, listed):
    from pallas_kernels.attention import triton

    for products in ("16", "tf32", "fp32"):
        # True fp32 in Hopper's tiles spills there.
        own = capability == (10, 0) and products == "fp32"
        entries = triton._tiles()["10.0" if own else listed][products]
        assert triton.tuning(capability, products, 5) is entries["64"]
        assert triton.tuning(capability, products, 65) is entries["128"]


def test_errors_of_tiles():
    from pallas_kernels.attention import triton

    with pytest.raises(
        ValueError,
        match=r"nothing for compute capability 7.5 with 99 KB of shared memory; it lists \['9.0'",
    ):
        triton.tuning((7, 5), "16", 64)
    with pytest.raises(
        ValueError, match="nothing under '9.0', '16' for a head dimension of 129; it has "
    ):
        triton.tuning((9, 0), "16", 129)
    with pytest.raises(ValueError, match="nothing under '9.0', '8' for a head dimension of 64"):
        triton.tuning((9, 0), "8", 64)
    tiles = copy.deepcopy(triton._tiles())
    assert triton._checked(tiles) is tiles
    entry = tiles["9.0"]["16"]["64"]
    entry["dq"]["M"] = 48
    with pytest.raises(
        ValueError,
        match="'9.0', '16', '64': M and N of 'dq' are powers of two from 16 on, not {'M': 48",
    ):
        triton._checked(tiles)
    del entry["dq"]["M"]
    with pytest.raises(
        ValueError,
        match="'9.0', '16', '64': 'dq' needs a positive number for each of .*, and has {'N'",
    ):
        triton._checked(tiles)
    fp32 = copy.deepcopy(triton._tiles())
    fp32["9.0"]["fp32"]["64"]["precision"] = "tf32"
    with pytest.raises(
        ValueError, match="'9.0', 'fp32', '64': 'precision' is 'ieee' or 'tf32x3', not 'tf32'"
    ):
        triton._checked(fp32)
    entry["backward"] = "both"
    with pytest.raises(
        ValueError, match="'9.0', '16', '64': 'backward' is 'split' or 'fused', not 'both'"
    ):
        triton._checked(tiles)
    del tiles["9.0"]["shared_kb"]
    with pytest.raises(ValueError, match="'9.0' needs a number of 'shared_kb'"):
        triton._checked(tiles)


SHARED_KB = {80: 163, 89: 99, 90: 227}


@pytest.mark.parametrize("capability", SHARED_KB)
@pytest.mark.parametrize(
    "dtype, head_dim, precision",
    [
        (jnp.bfloat16, 64, None),
        (jnp.bfloat16, 128, None),
        (jnp.float32, 64, None),
        (jnp.float32, 128, None),
        (jnp.float32, 64, "highest"),
    ],
    ids=["bf16 64", "bf16 128", "tf32 64", "tf32 128", "fp32 64"],
)
def test_compiles_without_spills(dtype, head_dim, precision, capability):
    # Bytes of the one kernel that spills, by version of Triton.
    spills = {("3.8", "dkv_kernel", jnp.float32, 128, 90): 88}
    version = triton_package.__version__.rpartition(".")[0]
    qkv = jax.ShapeDtypeStruct((64, 1024, 3, 12, head_dim), dtype)
    kernels = triton_kernels(packed_gradients(precision=precision), qkv, capability=capability)
    for kernel in kernels:
        spilled = spills.get((version, kernel.name, dtype, head_dim, capability), 0)
        assert kernel.spill_bytes == spilled, (kernel.name, kernel.registers, kernel.spill_bytes)
        assert kernel.shared_bytes <= SHARED_KB[capability] * 1024
        assert not kernel.serialized, kernel.name
    names = ["forward_kernel", "delta_kernel", "dkv_kernel", "dq_kernel"]
    if dtype == jnp.float32 and precision is None:
        # Copies of k and v; of q, k and v; and of dO, with delta.
        names = [
            "tf32_kernel",
            "forward_kernel",
            "tf32_kernel",
            "tf32_dout_kernel",
            "dkv_kernel",
            "dq_kernel",
        ]
    assert [k.name for k in kernels] == names
    for kernel in kernels:
        if kernel.name not in ("forward_kernel", "dkv_kernel", "dq_kernel"):
            continue
        instruction = "wgmma.mma_async" if capability == 90 else "mma.sync"
        # True fp32 has products in threes on Hopper's tensor cores, and on the plain cores
        # elsewhere.
        assert (instruction in kernel.ptx) == (precision is None or capability == 90)
        if precision is None:
            # Tiles go from global to shared memory while others are multiplied.
            assert "cp.async" in kernel.ptx
