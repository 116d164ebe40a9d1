"""Throughput and model FLOPs utilisation (MFU)."""

import collections
import re

Number = float | int  # the tests' type checker takes `float` at its word

# Peak FLOP/s of one device: fp32 outside the tensor cores; tf32 and bf16 on the tensor cores with
# fp32 accumulation, dense. NVIDIA's datasheets mark figures with 2:4 sparsity by a footnote; those
# are halved here. A name stands for the SXM module where the same chip also comes on slower PCIe
# cards, which are named.
PEAK_FLOPS: dict[str, dict[str, float]] = {
    # HGX B200 / GB200 NVL72 datasheet (Blackwell), "individual Blackwell GPU"
    "B200": {"fp32": 75e12, "tf32": 1100e12, "bf16": 2250e12},
    "GB200": {"fp32": 80e12, "tf32": 1250e12, "bf16": 2500e12},
    # H100 Tensor Core GPU architecture whitepaper; H100, H200 and GH200 datasheets (the last two
    # carry the H100 SXM's chip)
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
    # A10, A40 and RTX A6000 datasheets; the A10G is Amazon's variant with half the tensor cores'
    # speed; RTX 30: Ampere GA102 GPU architecture whitepaper
    "A10": {"fp32": 31.2e12, "tf32": 62.5e12, "bf16": 125e12},
    "A10G": {"fp32": 35e12, "tf32": 35e12, "bf16": 70e12},
    "A40": {"fp32": 37.4e12, "tf32": 74.8e12, "bf16": 149.7e12},
    "RTX A6000": {"fp32": 38.7e12, "tf32": 77.4e12, "bf16": 154.8e12},
    "RTX 3090": {"fp32": 35.6e12, "tf32": 35.6e12, "bf16": 71e12},
    "RTX 3090 Ti": {"fp32": 40e12, "tf32": 40e12, "bf16": 80e12},
    # V100, V100S and T4 datasheets: tensor cores for fp16 alone, neither TF32 nor bf16
    "V100": {"fp32": 15.7e12},
    "V100 PCIe": {"fp32": 14e12},
    "V100S PCIe": {"fp32": 16.4e12},
    "T4": {"fp32": 8.1e12},
}

_COLUMN = {"fp32": "fp32", "tf32": "tf32", "bf16": "bf16", "bf16_residual_fp32": "bf16"}
# Words of a device's name that say nothing about its speed: makers' brands, the SXM socket, the
# memory's size and type.
_NOISE = re.compile(r"nvidia|tesla|geforce|sxm\d*|\d+gb?|hbm\d\w*")


def _model_words(name: str) -> tuple[str, ...]:
    return tuple(
        word for word in re.findall(r"[a-z0-9]+", name.lower()) if not _NOISE.fullmatch(word)
    )


_PEAK_BY_WORDS = {_model_words(name): peaks for name, peaks in PEAK_FLOPS.items()}


def peak_flops(device_kind: str, precision_name: str) -> float | None:
    """Dense peak of one device in FLOP/s.

    The whole model name has to match: an unknown variant (a laptop part, a MIG slice, an export
    model) has no known peak.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        precision_name: a name of `gptjax.Precision`.

    Returns:
        FLOP/s, or None for an unknown device or a precision that the device does not have.

    Raises:
        ValueError: no such precision.
    """
    if precision_name not in _COLUMN:
        raise ValueError(f"unknown precision {precision_name!r}; choose one of {list(_COLUMN)}")
    return _PEAK_BY_WORDS.get(_model_words(device_kind), {}).get(_COLUMN[precision_name])


def mfu(
    tokens_per_second: Number,
    flops_per_token: Number,
    device_kind: str,
    precision_name: str,
    device_count: int,
) -> float | None:
    """Model FLOPs utilisation: tokens/s · FLOPs/token over the peak of all devices, as a fraction
    of 1.

    Args:
        tokens_per_second: of all devices together.
        flops_per_token: forward and backward, `GPT2Config.flops_per_token`.
        device_kind, precision_name: see `peak_flops`.
        device_count: devices of that kind.

    Returns:
        The fraction, or None where the peak is unknown.

    Raises:
        ValueError: no such precision.
    """
    peak = peak_flops(device_kind, precision_name)
    return None if peak is None else tokens_per_second * flops_per_token / (peak * device_count)


class Throughput:
    """Milliseconds a step, the mean of the last `window` steps.

    Time runs from one completed step to the next, so the first step, with its compilation, is never
    counted; nor is the one after `pause`, with the validation or checkpoint before it.
    """

    def __init__(self, window: int = 20):
        self._intervals_ms = collections.deque(maxlen=window)
        self._last: Number | None = None

    def step(self, now: Number) -> float | None:
        """Takes the time at which a step completed, in seconds; returns `ms_per_step`."""
        if self._last is not None:
            self._intervals_ms.append(1000 * (now - self._last))
        self._last = now
        return self.ms_per_step

    def pause(self) -> None:
        """Says that something other than a step is about to take time, or just did."""
        self._last = None

    @property
    def ms_per_step(self) -> float | None:
        """None until two steps in a row have completed."""
        return sum(self._intervals_ms) / len(self._intervals_ms) if self._intervals_ms else None
