"""Kernels of `fused_classifier` that store FACTOR times the gradient in a new FP8 array."""

import triton
import triton.language as tl

from pallas_kernels.classifier.triton import one_target, several_targets


@triton.jit
def classifier_to_fp8(
    logits_ptr,
    targets_ptr,
    out_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    SCALE: tl.constexpr = 1.0,
    SHIFT: tl.constexpr = None,
    WIDTH: tl.constexpr = None,
    FACTOR: tl.constexpr = 1.0,
):
    one_target(
        logits_ptr,
        out_ptr,
        targets_ptr,
        losses_ptr,
        V,
        VOCAB,
        IGNORE,
        R,
        K,
        SCALE,
        SHIFT,
        WIDTH,
        FACTOR,
    )


@triton.jit
def several_targets_to_fp8(
    logits_ptr,
    targets_ptr,
    weights_ptr,
    out_ptr,
    losses_ptr,
    V: tl.constexpr,
    VOCAB: tl.constexpr,
    IGNORE: tl.constexpr,
    R: tl.constexpr,
    K: tl.constexpr,
    TARGETS: tl.constexpr,
    M: tl.constexpr,
    SCALE: tl.constexpr = 1.0,
    SHIFT: tl.constexpr = None,
    WIDTH: tl.constexpr = None,
    FACTOR: tl.constexpr = 1.0,
):
    several_targets(
        logits_ptr,
        out_ptr,
        targets_ptr,
        weights_ptr,
        losses_ptr,
        V,
        VOCAB,
        IGNORE,
        R,
        K,
        TARGETS,
        M,
        SCALE,
        SHIFT,
        WIDTH,
        FACTOR,
    )


KERNELS = {
    "classifier_kernel": classifier_to_fp8,
    "several_targets_kernel": several_targets_to_fp8,
}
"""FP8 kernels by the name of the corresponding kernel that overwrites the logits."""
