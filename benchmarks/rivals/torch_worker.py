"""PyTorch's step on one of several devices: the script of the processes of `torch_several`.

ddp is `DistributedDataParallel`. The wrapped model is compiled, as PyTorch documents: Dynamo then
splits the graph at the buckets of gradients, and their all-reduce overlaps the backward pass.

fsdp2 is `fully_shard` of every block, and of the rest. Every block is compiled, and the head with
its loss.

The model is created without memory and sharded before its parameters are allocated.
"""

import dataclasses
import json
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch_gpt2 import How, TorchStep
from torch_side import torch_model

from gptjax.bench.harness import sustained
from gptjax.models.base import ModelConfig
from gptjax.terminal import first_line

ERROR = "error: "


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spec:
    """A step on several devices."""

    model: ModelConfig
    how: How
    """With flash=True: plain attention has a mask, which is not initialized here."""
    strategy: Literal["ddp", "fsdp2"]
    devices: int
    batch: int
    """Sequences of each device."""
    sequence_length: int
    device: Literal["cuda", "cpu"]
    reshard_after_forward: bool = True
    """fsdp2: release a block's gathered parameters after its forward pass and gather them again for
    its backward pass."""
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype in which gradients are summed over the devices."""
    forward: bool = False

    def fields(self) -> dict[str, str | bool]:
        """Return the fields of a row that describe the strategy."""
        fields = {"parallel": self.strategy, "reduce_dtype": self.reduce_dtype}
        if self.strategy == "fsdp2":
            fields["reshard_after_forward"] = self.reshard_after_forward
        return fields


def main(request: str, reply: str) -> None:
    """Run a request of `TorchSeveral`, a pickled pair of a `Spec` and the number of steps or
    seconds. The first process writes the reply. An error is a line that begins with `ERROR`."""
    spec, how = pickle.loads(Path(request).read_bytes())
    rank, device = int(os.environ["LOCAL_RANK"]), None
    if spec.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    try:
        distributed.init_process_group("nccl" if device else "gloo", device_id=device)
        step = WorkerStep(spec, rank)
        seconds = sustained(step.run, **how) if "seconds" in how else [step.run(**how)]
        loss = step.mean_loss()
        step.rest()
        peak = torch.tensor(step.peak or 0, device=spec.device)
        distributed.all_reduce(peak, distributed.ReduceOp.MAX)
        if rank == 0:
            answer = {"seconds": seconds, "loss": loss, "peak": int(peak) or None}
            Path(reply).write_text(json.dumps(answer))
        distributed.destroy_process_group()
        os._exit(0)  # Gloo's threads may abort the interpreter's exit
    except Exception as error:
        sys.exit(f"{ERROR}process {rank} of {spec.devices}: {first_line(error)}")


class WorkerStep(TorchStep):
    """The step on this process's share of the batch."""

    def __init__(self, spec: Spec, rank: int):
        self.spec = spec
        super().__init__(
            spec.model,
            spec.how,
            batch=spec.devices * spec.batch,
            sequence_length=spec.sequence_length,
            device=spec.device,
            forward=spec.forward,
        )
        share = slice(rank * spec.batch, (rank + 1) * spec.batch)
        self.tokens_BT = self.tokens_BT[share].contiguous()
        self.targets_BT = self.targets_BT[share].contiguous()
        if spec.strategy == "fsdp2":
            self.autocast = False  # its own policy casts the parameters

    def build(self, config: ModelConfig) -> tuple[nn.Module, Callable]:
        with torch.device("meta"):
            model = torch_model(config, self.how)
        if self.spec.strategy == "fsdp2":
            shard(model, self.spec)
        model.to_empty(device=self.device)
        torch.manual_seed(0)
        fill(model, self.device)
        return model, model if self.spec.strategy == "fsdp2" else self._replicated(model)

    def _replicated(self, model: nn.Module) -> Callable:
        devices = [torch.cuda.current_device()] if self.device == "cuda" else None
        ddp = DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        if self.spec.reduce_dtype == "bf16":
            ddp.register_comm_hook(None, bf16_compress_hook)
        return torch.compile(ddp, dynamic=False) if self.how.compiled else ddp

    def run(self, steps: int) -> float:
        """Return the seconds of this number of consecutive steps on the slowest device."""
        distributed.barrier()
        seconds = torch.tensor(super().run(steps), dtype=torch.float64, device=self.device)
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX)
        return seconds.item()

    def step(self) -> torch.Tensor:
        self._last_loss = super().step().detach()
        return self._last_loss

    def mean_loss(self) -> float:
        """Return the mean over the devices of the loss before the last update."""
        loss = self._last_loss.clone()
        distributed.all_reduce(loss)
        return loss.item() / self.spec.devices


def shard(model, spec: Spec) -> None:
    """Compile the parts of a model and shard its parameters over the devices."""
    if spec.how.compiled:
        for i, block in enumerate(model.blocks):
            model.blocks[i] = torch.compile(block, dynamic=False)
        model.head_loss = torch.compile(model.head_loss, dynamic=False)
    policy = MixedPrecisionPolicy()
    if spec.how.autocast:
        reduce_dtype = torch.float32 if spec.reduce_dtype == "fp32" else torch.bfloat16
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    elif spec.reduce_dtype == "bf16":
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    mesh = init_device_mesh(spec.device, (spec.devices,))
    reshard = spec.reshard_after_forward
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    # The parameters outside the blocks are needed again at once: for the head's backward pass.
    fully_shard(model, mesh=mesh, reshard_after_forward=False, mp_policy=policy)


@torch.no_grad()
def fill(model, device: str) -> None:
    """Fill the parameters with the same values for every sharding; only one parameter is gathered
    at a time."""
    for name, parameter in model.named_parameters():
        whole = torch.empty(parameter.shape, device=device)
        model.initialize(name, whole)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.copy_(whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
