"""Model FLOPs utilization (MFU)."""

import re

# Peak TFLOP/s of one device in fp32 without the tensor cores, and in tf32 and bf16 on the tensor
# cores with fp32 accumulation, dense. NVIDIA's datasheets mark figures with 2:4 sparsity by a
# footnote; these figures are halved here. A name without a suffix is the SXM module if there is
# also a slower PCIe card with the same chip.
PEAK_TFLOPS: dict[str, tuple[float, ...]] = {
    # HGX B200 / GB200 NVL72 datasheet (Blackwell), "individual Blackwell GPU"
    "B200": (75, 1100, 2250),
    "GB200": (80, 1250, 2500),
    # H100 Tensor Core GPU architecture whitepaper; H100, H200 and GH200 datasheets (H200 and GH200
    # have the H100 SXM's chip)
    "H100": (66.9, 494.7, 989.4),
    "H100 PCIe": (51.2, 378, 756),
    "H100 NVL": (60, 417.5, 835.5),
    "H200": (66.9, 494.7, 989.4),
    "H200 NVL": (60, 417.5, 835.5),
    "GH200": (66.9, 494.7, 989.4),
    # A100 datasheet: one peak for SXM and PCIe, 40 and 80 GB; A30 datasheet
    "A100": (19.5, 156, 312),
    "A100 PCIe": (19.5, 156, 312),
    "A30": (10.3, 82, 165),
    # L4, L40, L40S and RTX 6000 Ada datasheets; RTX 40: Ada GPU architecture whitepaper
    "L4": (30.3, 60, 121),
    "L40": (90.5, 90.5, 181),
    "L40S": (91.6, 183, 362),
    "RTX 6000 Ada Generation": (91.1, 182.1, 364.2),
    "RTX 4090": (82.6, 82.6, 165.2),
    "RTX 4080": (48.7, 48.7, 97.5),
    # RTX Blackwell GPU architecture whitepaper
    "RTX 5090": (104.8, 104.8, 209.5),
    "RTX 5080": (56.3, 56.3, 112.6),
    # A10, A40 and RTX A6000 datasheets; the A10G is Amazon's variant, with half the tensor-core
    # throughput; RTX 30: Ampere GA102 GPU architecture whitepaper
    "A10": (31.2, 62.5, 125),
    "A10G": (35, 35, 70),
    "A40": (37.4, 74.8, 149.7),
    "RTX A6000": (38.7, 77.4, 154.8),
    "RTX 3090": (35.6, 35.6, 71),
    "RTX 3090 Ti": (40, 40, 80),
    # V100, V100S and T4 datasheets: tensor cores for fp16 only, no TF32 or bf16
    "V100": (15.7,),
    "V100 PCIe": (14,),
    "V100S PCIe": (16.4,),
    "T4": (8.1,),
}

# Words in a device's name that do not determine the speed: brands, the SXM socket, size and type of
# the memory.
_NOISE = re.compile(r"nvidia|tesla|geforce|sxm\d*|\d+gb?|hbm\d\w*")


def _model_words(name: str) -> frozenset[str]:
    """Return the words of a name that determine the speed, in any order."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    return frozenset(word for word in words if not _NOISE.fullmatch(word))


_BY_WORDS = {_model_words(name): peaks for name, peaks in PEAK_TFLOPS.items()}


def peak_flops(device_kind: str, precision_name: str) -> float | None:
    """Return the dense peak of one device in FLOP/s; None for an unknown device, or a precision
    that the device does not support.

    The complete model name must match: an unknown variant (a laptop GPU, a MIG slice, an export
    model) has no known peak. FP8 uses the peak of bf16, because a part of the step remains in bf16.

    Args:
        device_kind: `jax.Device.device_kind`, such as "NVIDIA H100 80GB HBM3".
        precision_name: a name of `gptjax.Precision`.
    """
    peaks = _BY_WORDS.get(_model_words(device_kind), ())
    column = {"fp32": 0, "tf32": 1}.get(precision_name, 2)
    return 1e12 * peaks[column] if column < len(peaks) else None


def mfu(
    tokens_per_second: float | int,
    flops_per_token: float | int,
    device_kind: str,
    precision_name: str,
    device_count: int,
) -> float | None:
    """Return the model FLOPs utilization, tokens/s · FLOPs/token divided by the peak FLOP/s, as a
    fraction of 1; None if the peak is unknown.

    Args:
        tokens_per_second: throughput of all devices together.
        flops_per_token: forward and backward FLOPs, `ModelConfig.flops_per_token`.
        device_kind, precision_name: as in `peak_flops`.
        device_count: number of devices, all of the same kind.
    """
    peak = peak_flops(device_kind, precision_name)
    return None if peak is None else tokens_per_second * flops_per_token / (peak * device_count)
