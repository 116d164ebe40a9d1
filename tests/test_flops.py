"""Peak rates, MFU and throughput."""

import pytest

from gptjax import precision
from gptjax.training.flops import PEAK_TFLOPS, mfu, peak_flops

COLUMNS = ("fp32", "tf32", "bf16")


# Names as JAX reports them, where they are not those of the table with the brand.
NAMES = {
    "NVIDIA GH200 480GB": "GH200",
    "NVIDIA GH200 144G HBM3e": "GH200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100 PCIe",
    "NVIDIA A100-SXM4-80GB": "A100",
    "NVIDIA A100-PCIE-40GB": "A100 PCIe",
    "NVIDIA A100 80GB PCIe": "A100 PCIe",
    "NVIDIA GeForce RTX 3090 Ti": "RTX 3090 Ti",
    "Tesla V100-SXM2-16GB": "V100",
    "Tesla V100-PCIE-16GB": "V100 PCIe",
    "Tesla V100S-PCIE-32GB": "V100S PCIe",
}


def test_each_device_finds_its_own_row():
    for device_kind, name in ({f"NVIDIA {name}": name for name in PEAK_TFLOPS} | NAMES).items():
        peaks = dict(zip(COLUMNS, PEAK_TFLOPS[name], strict=False))
        for column in COLUMNS:
            expected = 1e12 * peaks[column] if column in peaks else None
            assert peak_flops(device_kind, column) == expected
    for name in [*precision.PRECISIONS][2:]:
        assert peak_flops("NVIDIA H200", name) == pytest.approx(989.4e12)


@pytest.mark.parametrize(
    "device_kind",
    ["cpu", "", "NVIDIA", "NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU",
     "NVIDIA GeForce RTX 4090 D", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"],
)  # fmt: skip
def test_an_unknown_variant_has_no_peak(device_kind):
    assert peak_flops(device_kind, "bf16") is None
    assert mfu(1e6, 1e9, device_kind, "bf16", 1) is None


def test_the_columns_are_in_order():
    for row in PEAK_TFLOPS.values():
        assert 8 <= row[0] and [*row] == sorted(row)
        # bf16 runs at twice TF32's rate on every chip, up to the datasheet's rounding
        assert len(row) == 1 or row[2] / row[1] == pytest.approx(2, rel=0.03)


def test_mfu_is_the_fraction_of_all_devices():
    # 300,000 tokens/s at 800 MFLOP each are 240 TFLOP/s.
    assert mfu(300_000, 8e8, "NVIDIA A100-SXM4-80GB", "bf16", 1) == pytest.approx(240 / 312)
    assert mfu(300_000, 8e8, "NVIDIA A100-SXM4-80GB", "tf32", 8) == pytest.approx(240 / 156 / 8)


# --------------------------------------------------------------------------------------- throughput
