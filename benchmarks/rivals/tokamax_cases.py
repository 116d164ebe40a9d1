"""Run tokamax's own test cases of attention on `pallas_kernels.flash_attention`.

    pip install --no-deps tokamax==0.0.17 qwix chex toolz einshape immutabledict
    python benchmarks/rivals/tokamax_cases.py --out benchmarks/results/tokamax_attention.json

tokamax's test class makes the arrays, calls an attention function with tokamax's arguments, and
compares the output, the gradients and a second run with its reference, with its tolerances. The
function here is `attend`, which translates the arguments. Its implementation is "auto": the kernels
on a GPU, plain JAX on a CPU.

Each case has a row with its outcome:

    passed   tokamax's comparison accepts the results, or tokamax expects an error and
             `flash_attention` raises it
    refused  `attend` has no translation; the reason says what is missing
    skipped  tokamax skips the case in every test class of its own
    failed   tokamax's comparison rejects the results, or the call raises

The exit code is 1 if a case failed. Cases that tokamax skips as too slow run here. Most of the time
is compilation: on a GPU, pass --jobs 14, with XLA_PYTHON_CLIENT_PREALLOCATE=false.
"""

import argparse
import concurrent.futures
import fnmatch
import importlib.util
import math
import multiprocessing
import re
import sys
import unittest
from collections import Counter
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

# Before tokamax imports jax-triton: with Triton 3.6, jax-triton needs what this module sets.
import pallas_kernels._triton  # noqa: F401
from gptjax.bench import results
from pallas_kernels import flash_attention
from pallas_kernels.extend import recorded

if importlib.util.find_spec("xprof") is None:  # 32 MB; only tokamax's benchmarks call it
    for name in ("xprof", "xprof.cli", "xprof.cli.tools"):
        sys.modules[name] = mock.MagicMock()

import qwix
from tokamax._src.ops.attention import base, test_base

SCRIPT = "benchmarks/rivals/tokamax_cases.py"
PACKAGES = ("tokamax", "qwix", "chex")
used: list[str] = []
"""Options of `flash_attention` in the current case."""


class Refused(Exception):
    """The call has no translation."""


def attend(
    q,
    k,
    v,
    *,
    precision=None,
    logits_dtype=None,
    logits_scale=base.AUTO,
    bias=None,
    logits_soft_cap=None,
    mask=None,
    is_causal=False,
    dropout_mask=None,
    dropout_rate=0.0,
    q_indices=None,
    k_indices=None,
    normalize_output=True,
    return_residuals=False,
):
    """Call `flash_attention` with the arguments of tokamax's `DotProductAttention`.

    `logits_dtype` has no effect: the scores are fp32. tokamax's gradients repeat bit for bit, and
    its cases compare two runs: `deterministic=True`.
    """
    if any(isinstance(x, qwix.QArray) for x in (q, k, v)):
        raise Refused("quantized arrays; flash_attention has fp32, bf16 and fp16")
    if dropout_mask is not None or dropout_rate:
        raise Refused("dropout; flash_attention has none")
    if bias is not None and logits_soft_cap is not None:
        raise Refused("a soft cap of scores with a bias; flash_attention adds the bias after it")
    if not (normalize_output or return_residuals):
        raise Refused("an output that is not normalized; flash_attention has the log-sum-exp only")

    *batch, queries, heads, _ = q.shape
    keys = k.shape[-3]
    options = {
        "causal": False,
        "scale": None if logits_scale is base.AUTO else logits_scale,
        "softcap": logits_soft_cap,
        "precision": precision,
        "return_lse": return_residuals,
    }
    mask = base.Mask() & mask if mask is not None else base.Mask()
    mask = mask & base.CausalMask() if is_causal else mask
    if mask.causal_mask is not None and q_indices is k_indices is None:
        mask, causal = mask.take("causal_mask")
        options |= {"causal": True, "window": causal.window_size, "query_start": causal.offset}
    if k_indices is None:  # the ranges that all heads share
        first, last, some = jnp.zeros((1, 1), jnp.int32), jnp.full((1, 1), keys - 1), False
        if (causal := mask.causal_mask) and q_indices is not None and causal.window_size is None:
            mask, _ = mask.take("causal_mask")
            last, some = jnp.minimum(last, q_indices + causal.offset), True
        if mask.k_start is not None and mask.k_start.shape[-2] == 1:
            mask, start = mask.take("k_start")
            first, some = jnp.maximum(first, start), True
        if mask.k_end is not None and mask.k_end.shape[-2] == 1:
            mask, end = mask.take("k_end")
            last, some = jnp.minimum(last, end - 1), True
        if some:
            rows = (jnp.broadcast_to(x[..., 0, :], (*batch, queries)) for x in (first, last))
            options["key_range"] = tuple(x.reshape(-1, queries) for x in rows)
    mask, seen = mask.take("bool_mask")
    given = zip((q_indices, k_indices), (queries, keys), strict=True)
    rest = mask.as_array(*(n if x is None else x for x, n in given))
    if rest is not None:
        seen = rest if seen is None else seen & rest
    if seen is not None:
        bias = jnp.where(seen, 0 if bias is None else bias, -jnp.inf).astype(q.dtype)
    if bias is not None:
        options["bias"] = bias_BHTS(bias, batch, queries, keys)
    used[:] = [name for name, x in options.items() if x is not None and x is not False]

    flat = [x.reshape(-1, *x.shape[-3:]) for x in (q, k, v)]
    out = flash_attention(*flat, deterministic=True, **options)
    if not return_residuals:
        return out.reshape(*batch, queries, heads, -1)
    out, lse_BHT = out
    lse = lse_BHT.reshape(*batch, heads, queries)
    # tokamax's pair (m, l) stands for m + log l, and the output is relative to it.
    return out.reshape(*batch, queries, heads, -1), (lse, jnp.ones_like(lse))


def bias_BHTS(bias, batch, queries, keys):
    """Return the bias with one axis of the batch, and every query and key."""
    bias = jax.lax.broadcast_to_rank(bias, len(batch) + 3)
    sizes = bias.shape[:-3]
    if math.prod(sizes) > 1:
        sizes = tuple(batch)
    rows = [n if m == 1 else m for n, m in zip((queries, keys), bias.shape[-2:], strict=True)]
    bias = jnp.broadcast_to(bias, (*sizes, bias.shape[-3], *rows))
    return bias.reshape(-1, *bias.shape[-3:])


class Cases(test_base.AttentionTestBase):
    """tokamax's cases, also the slow ones."""

    def __init__(self, name):
        super().__init__(name, attention_fn=attend)

    def skipTest(self, reason):
        if reason != "Too slow for OSS":
            super().skipTest(reason)

    def assertRaises(self, exception):
        return self.assertRaisesRegex(ValueError, "^flash_attention: expected")


def run(name: str) -> dict:
    """Run a case; return its row."""
    used.clear()
    jax.clear_caches()
    result = unittest.TestResult()
    with recorded() as choices:
        Cases(name).run(result)
    row = {"case": name.removeprefix("test_")}
    if result.skipped:
        return row | {"outcome": "skipped", "reason": result.skipped[0][1]}
    if not (problems := result.errors + result.failures):
        back_ends = ", ".join(sorted({choice.back_end for choice in choices}))
        return row | {"outcome": "passed", "back_ends": back_ends, "options": ", ".join(used)}
    text = problems[0][1]
    if refusal := re.search(rf"^(\w+\.)?{Refused.__name__}: (.*)$", text, re.MULTILINE):
        return row | {"outcome": "refused", "reason": refusal[2]}
    error = re.split(r"^(?=[\w.]+(?:Error|Exception)\b)", text, flags=re.MULTILINE)[-1]
    return row | {"outcome": "failed", "reason": error.strip()[:600]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file of the result")
    parser.add_argument("--only", default="*", help="pattern of the cases, such as 'vmap*'")
    parser.add_argument("--jobs", type=int, default=1, help="processes, which share a GPU")
    arguments = parser.parse_args()
    rows, names = [], unittest.defaultTestLoader.getTestCaseNames(Cases)
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(arguments.jobs, mp_context=spawn) as pool:
        for row in pool.map(run, fnmatch.filter(names, f"test_{arguments.only}")):
            rows.append(row)
            print(" ".join(str(x) for x in row.values()), flush=True)
    print(dict(Counter(row["outcome"] for row in rows)))
    if arguments.out:
        device, command = jax.devices()[0].device_kind, results.command(SCRIPT)
        result = results.new(command, rows, device=device, packages=PACKAGES)
        results.write(arguments.out, result)
    return any(row["outcome"] == "failed" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
