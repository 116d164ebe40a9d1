"""gptjax.bench --torch in FP8: PyTorch's matmuls against fp64, and which layers are in FP8."""

import dataclasses
from collections import Counter

import numpy as np
import pytest
import torch
from bench_tools import TINY
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gptjax.bench import ladder, measuring, torch_fp8, torch_side
from gptjax.bench.configs import base_config, one_micro_batch
from gptjax.bench.torch_gpt2 import How, TorchStep
from gptjax.models.llama3 import Llama3Config
from gptjax.precision import Precision

LLAMA = Llama3Config(
    vocab_size=61, padded_vocab_size=64, block_size=8, n_layer=2, n_head=2, n_kv_head=1, n_embd=32
)


class Matmuls(TorchDispatchMode):
    """Count PyTorch's matmuls while active."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "_scaled_mm":
            fast = (*args[7:], (kwargs or {}).get("use_fast_accum", False))[0]
            name += " fast" if fast else " slow"
        if name.startswith("_scaled_mm") or name in ("mm", "addmm", "linear"):
            self.calls[name] += 1
        return function(*args, **kwargs or {})


def rounded(x, dtype):
    inverse = x.abs().max().float() / torch.finfo(dtype).max
    return (x.float() / inverse).to(dtype).double() * inverse.double()


def test_a_linear_layer():
    """y, dx, dw and db are those of operands rounded to FP8, rounded to bf16."""
    torch.manual_seed(0)
    layer = torch_fp8.Linear(32, 48)
    x = torch.randn(2, 16, 32, requires_grad=True)
    dy = torch.randn(2, 16, 48).mul(1e-6).to(torch.bfloat16)
    y = layer(x)
    assert y.dtype == torch.bfloat16 and y.shape == (2, 16, 48)
    y.backward(dy)
    (w, b), (e4m3, e5m2) = layer.parameters(), (torch_fp8.E4M3, torch_fp8.E5M2)
    xq, wq, dyq = (rounded(a, d) for a, d in ((x.detach(), e4m3), (w.detach(), e4m3), (dy, e5m2)))
    right = {
        "y": (y, xq @ wq.T + b.double()),
        "dx": (x.grad, dyq @ wq),
        "dw": (w.grad, dyq.flatten(0, 1).T @ xq.flatten(0, 1)),
        "db": (b.grad, dy.double().sum((0, 1))),
    }
    for name, (found, expected) in right.items():
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 0.004, f"{name}: relative error {error:.3g}"
    # Unlike those of the arrays themselves.
    error = (y.double() - (x.double() @ w.double().T + b)).norm() / y.double().norm()
    assert 0.01 < error < 0.06


def test_sizes_that_the_tensor_cores_do_not_have():
    with pytest.raises(ValueError, match=r"multiples of 16 as sizes, got \(8, 32\) and \(48, 32\)"):
        torch_fp8.Linear(32, 48)(torch.zeros(8, 32))


@pytest.mark.parametrize("model", [TINY, LLAMA], ids=["gpt2", "llama3"])
@pytest.mark.parametrize("precision", ["fp8", "fp8_head"])
def test_every_linear_layer_is_in_fp8(model, precision):
    """Three matmuls of each layer, the first with fast sums; the loss of bf16, nearly."""
    model = dataclasses.replace(model, n_embd=32)
    steps = {
        name: TorchStep(
            model, How(precision=name, compiled=False), batch=4, sequence_length=8, device="cpu"
        )
        for name in ("bf16", precision)
    }
    with torch.no_grad():
        for ours, theirs in zip(*(step.model.parameters() for step in steps.values()), strict=True):
            ours.add_(0.1 * torch.randn_like(ours))
            theirs.copy_(ours)
    with Matmuls() as counted:
        loss = steps[precision].step().item()
    layers = sum(isinstance(module, nn.Linear) for module in steps[precision].model.modules())
    assert layers == 4 * model.n_layer
    in_fp8 = 1 + (layers if precision == "fp8" else 0)
    assert counted.calls["_scaled_mm fast"] == in_fp8
    assert counted.calls["_scaled_mm slow"] == 2 * in_fp8
    others = sum(n for name, n in counted.calls.items() if name in ("mm", "addmm", "linear"))
    assert others == 3 * (layers + 1 - in_fp8), counted.calls
    expected = steps["bf16"].step().item()
    assert 0 < abs(loss - expected) < 0.02 * expected
    grown = [p.detach().norm().item() for p in steps[precision].model.parameters()]
    assert np.isfinite(grown).all()


def test_the_precision_of_pytorchs_step_is_the_configs():
    """Not bf16 under the name of FP8."""
    base = one_micro_batch(base_config(None, None), 4, 8)
    device = measuring.one_device()
    expected = {"bf16_residual_fp32": "bf16", "fp8_head": "fp8_head", "fp8": "fp8", "tf32": "tf32"}
    for name, theirs in expected.items():
        model = dataclasses.replace(base.model, precision=Precision(name))
        how = torch_side.how_of(dataclasses.replace(base, model=model), device)
        assert how.precision == theirs
        assert ("FP8" in str(how)) == ("fp8" in theirs) and how.autocast == (theirs != "tf32")


def test_the_ladders_last_rung():
    hows = dict(ladder.torch_rungs(compiled=True, fp8=True))
    assert list(hows)[-1] == "FP8" and hows["FP8"] == How(precision="fp8")
    assert ladder._same_model(hows["FP8"]) != ladder._same_model(hows["fused AdamW"])
    assert ladder._same_model(hows["bf16 autocast"]) == ladder._same_model(hows["TF32"])
