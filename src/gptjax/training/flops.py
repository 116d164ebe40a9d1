"""Throughput and model FLOPs utilization (MFU)."""

import collections
import re

Number = float | int  # jaxtyping under pytest rejects an int for `float`

# Peak FLOP/s of one device: fp32 without the tensor cores; tf32 and bf16 on the tensor cores with
# fp32 accumulation, dense. NVIDIA's datasheets mark figures with 2:4 sparsity by a footnote; these
# figures are halved here. A name without a suffix is the SXM module if there is also a slower PCIe
# card with the same chip.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    # HGX B200 / GB200 NVL72 datasheet (Blackwell), "individual Blackwell GPU"
    "B200": {"fp32": 75e12, "tf32": 1100e12, "bf16": 2250e12},
    "GB200": {"fp32": 80e12, "tf32": 1250e12, "bf16": 2500e12},
    # H100 Tensor Core GPU architecture whitepaper; H100, H200 and GH200 datasheets (H200 and GH200
    # have the H100 SXM's chip)
    "H100": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "H100 PCIe": {"fp32": 51.2e12, "tf32": 378e12, "bf16": 756e12},
    "H100 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12},
    "H200": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    "H200 NVL": {"fp32": 60e12, "tf32": 417.5e12, "bf16": 835.5e12},
    "GH200": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12},
    # A100 datasheet: one peak for SXM and PCIe, 40 and 80 GB; A30 datasheet
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "A100 PCIe": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12},
    "A30": {"fp32": 10.3e12, "tf32": 82e12, "bf16": 165e12},
    # L4, L40, L40S and RTX 6000 Ada datasheets; RTX 40: Ada GPU architecture whitepaper
    "L4": {"fp32": 30.3e12, "tf32": 60e12, "bf16": 121e12},
    "L40": {"fp32": 90.5e12, "tf32": 90.5e12, "bf16": 181e12},
    "L40S": {"fp32": 91.6e12, "tf32": 183e12, "bf16": 362e12},
    "RTX 6000 Ada Generation": {"fp32": 91.1e12, "tf32": 182.1e12, "bf16": 364.2e12},
    "RTX 4090": {"fp32": 82.6e12, "tf32": 82.6e12, "bf16": 165.2e12},
    "RTX 4080": {"fp32": 48.7e12, "tf32": 48.7e12, "bf16": 97.5e12},
    # RTX Blackwell GPU architecture whitepaper
    "RTX 5090": {"fp32": 104.8e12, "tf32": 104.8e12, "bf16": 209.5e12},
    "RTX 5080": {"fp32": 56.3e12, "tf32": 56.3e12, "bf16": 112.6e12},
    # A10, A40 and RTX A6000 datasheets; the A10G is Amazon's variant, with half the tensor-core
    # throughput; RTX 30: Ampere GA102 GPU architecture whitepaper
    "A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "A10G": {"fp32": 35e12, "tf32": 35e12, "bf16": 70e12},
    "A40": {"fp32": 37.4e12, "tf32": 74.8e12, "bf16": 149.7e12},
    "RTX A6000": {"fp32": 38.7e12, "tf32": 77.4e12, "bf16": 154.8e12},
    "RTX 3090": {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12},
    "RTX 3090 Ti": {"fp32": 40e12, "tf32": 40e12, "bf16": 80e12},
    # V100, V100S and T4 datasheets: tensor cores for fp16 only, no TF32 or bf16
    "V100": {"fp32": 15.7e12},
    "V100 PCIe": {"fp32": 14e12},
    "V100S PCIe": {"fp32": 16.4e12},
    "T4": {"fp32": 8.1e12},
}

# Peak memory bandwidth of one device in bytes/s, from the same sources. A name with a memory size
# holds for that size only.
PEAK_BANDWIDTH: dict[str, float] = {
    "B200": 7.7e12, "GB200": 8e12,
    "H100": 3.35e12, "H100 PCIe": 2e12, "H100 NVL": 3.9e12, "H200": 4.8e12, "H200 NVL": 4.8e12,
    "GH200 480GB": 4e12, "GH200 144G": 4.9e12,
    "A100 40GB": 1.555e12, "A100 80GB": 2.039e12,
    "A100 PCIe 40GB": 1.555e12, "A100 PCIe 80GB": 1.935e12, "A30": 933e9,
    "L4": 300e9, "L40": 864e9, "L40S": 864e9, "RTX 6000 Ada Generation": 960e9,
    "RTX 4090": 1008e9, "RTX 4080": 716.8e9, "RTX 5090": 1792e9, "RTX 5080": 960e9,
    "A10": 600e9, "A10G": 600e9, "A40": 696e9, "RTX A6000": 768e9,
    "RTX 3090": 936e9, "RTX 3090 Ti": 1008e9,
    "V100": 900e9, "V100 PCIe": 900e9, "V100S PCIe": 1134e9, "T4": 300e9,
}  # fmt: skip

# FP8 uses the peak of bf16, because a part of the step remains in bf16. The table is a literal,
# because `gptjax.precision` imports JAX, and commands that read a log start without JAX.
_COLUMN = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16_residual_fp32": "bf16"}
_COLUMN |= {"fp8_head": "bf16", "fp8": "bf16"}
# Words in a device's name that do not determine the speed: brands, the SXM socket, size and type of
# the memory.
_NOISE = re.compile(r"nvidia|tesla|geforce|sxm\d*|\d+gb?|hbm\d\w*")


def _words(name: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", name.lower())


def _model_words(name: str) -> frozenset[str]:
    """Return the words of a name that determine the speed, in any order."""
    return frozenset(word for word in _words(name) if not _NOISE.fullmatch(word))


_PEAK_BY_WORDS = {_model_words(name): peaks for name, peaks in PEAK_FLOPS.items()}


def peak_flops(device_kind: str, precision_name: str) -> float | None:
    """Return the dense peak of one device in FLOP/s.

    The complete model name must match: an unknown variant (a laptop GPU, a MIG slice, an export
    model) has no known peak.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        precision_name: a name of `gptjax.Precision`.

    Returns:
        FLOP/s, or None for an unknown device or a precision that the device does not support.

    Raises:
        ValueError: unknown precision.
    """
    if precision_name not in _COLUMN:
        raise ValueError(f"unknown precision {precision_name!r}; choose one of {list(_COLUMN)}")
    return _PEAK_BY_WORDS.get(_model_words(device_kind), {}).get(_COLUMN[precision_name])


def peak_bandwidth(device_kind: str) -> float | None:
    """Return the peak memory bandwidth of one device in bytes/s, or None for an unknown device.

    Args:
        device_kind: as in `peak_flops`.
    """
    words, model = {*_words(device_kind)}, _model_words(device_kind)
    found = [
        rate
        for name, rate in PEAK_BANDWIDTH.items()
        if _model_words(name) == model and words.issuperset(_words(name))
    ]
    return found[0] if found else None


def mfu(
    tokens_per_second: Number,
    flops_per_token: Number,
    device_kind: str,
    precision_name: str,
    device_count: int,
    peak: Number | None = None,
) -> float | None:
    """Return the model FLOPs utilization: tokens/s · FLOPs/token divided by the peak FLOP/s.

    Args:
        tokens_per_second: throughput of all devices together.
        flops_per_token: forward and backward FLOPs, `ModelConfig.flops_per_token`.
        device_kind: `jax.Device.device_kind`.
        precision_name: a name of `gptjax.Precision`.
        device_count: number of devices, all of the same kind.
        peak: peak of one device in FLOP/s. None: the result of `peak_flops`.

    Returns:
        A fraction of 1, or None if the peak is unknown.

    Raises:
        ValueError: unknown precision.
    """
    known = peak_flops(device_kind, precision_name)
    peak = known if peak is None else peak
    return None if peak is None else tokens_per_second * flops_per_token / (peak * device_count)


class Throughput:
    """Mean time of the last `window` steps in milliseconds.

    The time of a step is the interval between two completed steps. The first step, which includes
    compilation, is not counted, nor is the step after `pause`, which includes validation or a
    checkpoint.
    """

    def __init__(self, window: int = 20):
        self._intervals_ms = collections.deque(maxlen=window)
        self._last: Number | None = None

    def step(self, now: Number) -> float | None:
        """Record the time in seconds at which a step completed; return `ms_per_step`."""
        if self._last is not None:
            self._intervals_ms.append(1000 * (now - self._last))
        self._last = now
        return self.ms_per_step

    def pause(self) -> None:
        """Exclude the current interval, which includes time outside of steps."""
        self._last = None

    @property
    def ms_per_step(self) -> float | None:
        """Mean step time in milliseconds; None until two consecutive steps have completed."""
        return sum(self._intervals_ms) / len(self._intervals_ms) if self._intervals_ms else None
