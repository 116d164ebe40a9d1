"""Tests of chapter 10, on a CPU: the maths, the interpreted kernel, the compiled kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ch04_loss.solution import cross_entropy, cross_entropy_gradient
from tiny import normal

import pallas_kernels

pytest.importorskip("triton", reason="chapter 10 needs: pip install jax-triton torch (Linux)")
pytest.importorskip("torch", reason="chapter 10 needs: pip install jax-triton torch (Linux)")

from triton_on_cpu import compile_to_ptx, interpret

ROWS, VOCAB = 4, 100


def logits_and_targets():
    (logits_NV,) = normal((ROWS, VOCAB))
    return 5 * logits_NV, jnp.array([0, 99, 31, 64])


def run(chapter, logits_NV, targets_N, block):
    """Run the kernel on a CPU. The losses are NaN until the kernel stores them."""
    arrays = [logits_NV, targets_N, np.full(len(targets_N), np.nan, np.float32)]
    gradient_NV, _, losses_N = interpret(
        chapter.classifier_kernel, arrays, (len(targets_N),), V=logits_NV.shape[1], BLOCK=block
    )
    return losses_N, gradient_NV


def test_the_maths_of_a_program(chapter):
    logits_NV, targets_N = logits_and_targets()
    losses_N = cross_entropy(logits_NV, targets_N)
    gradient_NV = cross_entropy_gradient(logits_NV, targets_N)
    classify_row = jax.jit(chapter.classify_row, static_argnums=2)
    for row in range(2):
        loss, gradient_V = classify_row(logits_NV[row], targets_N[row], 32)
        np.testing.assert_allclose(loss, losses_N[row], rtol=1e-5)
        np.testing.assert_allclose(gradient_V, gradient_NV[row], atol=1e-6)


def test_the_kernel_is_the_fused_classifier_of_pallas_kernels(chapter):
    logits_NV, targets_N = logits_and_targets()
    reference = functools.partial(pallas_kernels.fused_classifier, implementation="reference")
    expected = jax.jit(reference)(logits_NV, targets_N)
    # A row of 100 columns in one block, and in four, the last of which is not full.
    for block in (128, 32):
        losses_N, gradient_NV = run(chapter, logits_NV, targets_N, block)
        np.testing.assert_allclose(losses_N, expected[0], rtol=1e-5)
        np.testing.assert_allclose(gradient_NV, expected[1], atol=1e-6)


def test_large_logits_do_not_overflow(chapter):
    logits_NV, targets_N = logits_and_targets()
    losses_N, _ = run(chapter, logits_NV + 1000, targets_N, 32)
    np.testing.assert_allclose(losses_N, cross_entropy(logits_NV, targets_N), atol=1e-3)


def test_the_kernel_stores_nothing_outside_its_rows(chapter):
    logits_NV, targets_N = logits_and_targets()
    arrays = [logits_NV, targets_N, np.full(ROWS, np.nan, np.float32)]
    # A launch for the first two rows only.
    gradient_NV, _, losses_N = interpret(chapter.classifier_kernel, arrays, (2,), V=VOCAB, BLOCK=32)
    assert np.isfinite(losses_N[:2]).all() and np.isnan(losses_N[2:]).all()
    np.testing.assert_array_equal(gradient_NV[2:], logits_NV[2:])


def test_the_kernel_compiles_for_an_h100(chapter):
    dtypes = ["float32", "int32", "float32"]
    ptx = compile_to_ptx(chapter.classifier_kernel, dtypes, V=50257, BLOCK=1024)
    assert ".target sm_90" in ptx
    assert "ex2.approx" in ptx and "st.global" in ptx
