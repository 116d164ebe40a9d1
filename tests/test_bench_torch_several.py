"""gptjax.bench step --torch on several devices: PyTorch's processes compute the step of one process
on the whole batch, and one that fails is reported."""

import dataclasses
import json
import multiprocessing
import os
import time

import numpy as np
import pytest
import torch
from bench_tools import TINY
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gptjax.bench import measuring, torch_several, torch_worker
from gptjax.bench.__main__ import main
from gptjax.bench.compare import compare
from gptjax.bench.errors import BenchError
from gptjax.bench.torch_gpt2 import How, TorchStep
from gptjax.bench.torch_several import Spec, TorchSeveral

# The fixture `card`.
pytest_plugins = ["bench_tools"]
SPEC = Spec(
    model=TINY,
    how=How(precision="fp32", compiled=False),
    strategy="ddp",
    devices=2,
    batch=2,
    sequence_length=8,
    device="cpu",
)


@pytest.fixture
def forked(monkeypatch):
    """Start PyTorch's processes by forks of one server that has imported PyTorch: 4 s less each.

    `test_rows` starts them as a user does.
    """
    server = multiprocessing.get_context("forkserver")
    # A server that runs already keeps its modules.
    server.set_forkserver_preload(["gptjax.bench.torch_worker"])
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: server)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measuring, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "REST_SECONDS", 0.0)
    monkeypatch.setattr(measuring, "TURNS", 1)


# ----------------------------------------------------------------------------------------- one step


@pytest.mark.parametrize(
    ("strategy", "reshard"), [("ddp", True), ("fsdp2", True), ("fsdp2", False)]
)
def test_the_step_is_that_of_one_process_on_the_whole_batch(forked, strategy, reshard):
    """Four losses: the gradients, the clip and the update are the same, too."""
    one = TorchStep(TINY, SPEC.how, batch=4, sequence_length=8, device="cpu")
    torch.manual_seed(0)
    torch_worker.fill(one.model, "cpu")
    expected = [one.step().item() for _ in range(4)]
    spec = dataclasses.replace(SPEC, strategy=strategy, reshard_after_forward=reshard)
    several, found = TorchSeveral(spec), []
    for _ in range(4):
        assert several.run(1) > 0
        found.append(several.loss)
    several.rest()
    np.testing.assert_allclose(found, expected, rtol=5e-7)
    assert found[0] - found[3] > 0.05
    assert several.peak is None and several.has_room() and not multiprocessing.active_children()


class Allocations(TorchDispatchMode):
    """Records the elements of the largest new tensor that has memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor) and out.device.type != "meta":
            self.largest = max(self.largest, out.untyped_storage().nbytes() // out.itemsize)
        return out


def test_fsdp2_allocates_shards(monkeypatch):
    """One process of four: the model is sharded before it has memory, and then filled one parameter
    at a time."""
    shard, without_memory = torch_worker.shard, []

    def record(model, spec):
        without_memory.extend(p.is_meta for p in model.parameters())
        shard(model, spec)

    monkeypatch.setattr(torch_worker, "shard", record)
    model = dataclasses.replace(TINY, n_layer=6)
    spec = dataclasses.replace(SPEC, model=model, strategy="fsdp2", devices=4)
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        with Allocations() as allocations:
            step = torch_worker.WorkerStep(spec, 1)
        parameters = list(step.model.parameters())
        assert len(without_memory) == len(parameters) and all(without_memory)
        total = sum(p.numel() for p in parameters)
        assert sum(p.to_local().numel() for p in parameters) == total / 4
        assert allocations.largest == max(p.numel() for p in parameters) < total / 8
    finally:
        distributed.destroy_process_group()


# --------------------------------------------------------------------------------------------- rows


@pytest.mark.usefixtures("optax_promotion")
def test_rows(card, tmp_path, capsys):
    out = tmp_path / "several.json"
    command = ["step", "--config", card, "--devices", "2", "--parallel", "data", "zero1", "--torch"]
    assert main([*command, "--seconds", "0.01", "--out", str(out)]) == 0
    data, ddp, zero1, fsdp2 = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in (data, ddp, zero1, fsdp2)] == ["gptjax", "torch"] * 2
    assert (ddp["parallel"], fsdp2["parallel"]) == ("ddp", "fsdp2")
    assert "reshard_after_forward" not in ddp and fsdp2["reshard_after_forward"] is False
    for ours, theirs in ((data, ddp), (zero1, fsdp2)):
        assert theirs["devices"] == 2 and theirs["reduce_dtype"] == "fp32"
        assert theirs["tokens/s"] == pytest.approx(2 * 2 * 8 / theirs["ms"] * 1e3)
        assert ours["of_torch"] == pytest.approx(theirs["ms"] / ours["ms"])
    shown = capsys.readouterr().out
    assert "2 devices · ddp" in shown and "2 devices · fsdp2 · gathered once" in shown


def test_rows_of_several_devices_are_not_those_of_one():
    row = {"system": "torch", "ms": 1.0}
    fsdp = {"devices": 2, "parallel": "fsdp2", "reshard_after_forward": True}
    old = [row, row | fsdp, row | fsdp | {"reduce_dtype": "bf16"}]
    new = [row | {"devices": 1, "ms": 2.0}]
    new += [row | fsdp | {"ms": 3.0}, row | fsdp | {"reshard_after_forward": False}]
    pairs = compare(old, new)
    assert [(pair["name"], pair.get("ratio")) for pair in pairs] == [
        ("torch", 2.0),
        ("torch · 2 devices · fsdp2", 3.0),
        ("torch · 2 devices · fsdp2 · bf16", None),
        ("torch · 2 devices · fsdp2 · gathered once", None),
    ]


# ----------------------------------------------------------------------------------------- failures


def out_of_memory(connection, spec, rank, store):
    """Process 1 fails in its step, and the other waits for it."""

    def run(self, steps):
        raise torch.OutOfMemoryError("CUDA out of memory.\nAnd more.")

    if rank == 1:
        torch_worker.WorkerStep.run = run
    torch_worker.work(connection, spec, rank, store)


def killed(connection, spec, rank, store):
    if rank == 0:
        os._exit(7)
    torch_worker.work(connection, spec, rank, store)


def hangs(connection, spec, rank, store):
    time.sleep(600)


@pytest.mark.parametrize(
    ("work", "limit", "message"),
    [
        (out_of_memory, 300, "process 1 of 2: OutOfMemoryError: CUDA out of memory.$"),
        (killed, 300, "process 0 of 2: ended with exit code 7$"),
        (hangs, 0.1, r"processes \[0, 1\] of 2 did not reply within 0.1 s: all were ended$"),
    ],
)
def test_a_process_that_fails_ends_all(forked, work, limit, message, monkeypatch):
    monkeypatch.setattr(torch_several, "work", work)
    monkeypatch.setattr(torch_several, "REPLY_SECONDS", limit)
    several = TorchSeveral(SPEC)
    with pytest.raises(BenchError, match=message):
        several.run(1)
    assert not multiprocessing.active_children()


def test_the_cause_is_reported_and_not_its_consequence(monkeypatch):
    """Process 0's error came later, but is read first."""
    several = TorchSeveral(SPEC)
    pipes = [multiprocessing.Pipe() for _ in range(2)]
    several._workers = [(None, here) for here, _ in pipes]
    for (_, there), reply in zip(
        pipes, ({"error": "closed", "at": 2.0}, {"error": "full", "at": 1.0}), strict=True
    ):
        there.send(reply)
    with pytest.raises(BenchError, match="process 1 of 2: full"):
        several._replies()
    for pipe in (end for pair in pipes for end in pair):
        pipe.close()


@pytest.mark.usefixtures("optax_promotion")
def test_a_failure_is_a_row_beside_gptjaxs(forked, card, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch_several, "work", killed)
    out = tmp_path / "several.json"
    command = ["step", "--config", card, "--devices", "2", "--torch", "--seconds", "0.01"]
    assert main([*command, "--out", str(out)]) == 1
    ours, theirs = json.loads(out.read_text())["rows"]
    assert ours["ms"] > 0 and "ended with exit code 7" in theirs["error"]
    assert "did not run:\ntorch · tiny" in capsys.readouterr().err


def test_room_for_a_second_turn(monkeypatch):
    several = TorchSeveral(SPEC)
    free = [50 * 2**30, 20 * 2**30]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 2**40))
    several.peak = 20 * 2**30 - torch_several.OVERHEAD_BYTES
    assert several.has_room()
    several.peak += 1
    assert not several.has_room()
