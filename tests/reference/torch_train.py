"""Training steps in PyTorch, for the tests to compare with: AdamW as nanoGPT and llm.c use it for
GPT-2."""

import torch
from reference.torch_gpt2 import TorchGPT2, autocasts, computing


def train(
    model: TorchGPT2,
    batches: list[tuple[torch.Tensor, torch.Tensor]],
    learning_rates: list[float],
    *,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    precision: str = "fp32",
) -> list[float]:
    """One optimizer step for each learning rate, over the batches in turn. Returns the loss before
    each step.

    Decay acts on tensors of two dimensions or more (matrices and both embeddings), not on biases
    and LayerNorm.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.0,
        betas=betas,
        eps=eps,
        fused=False,
    )
    device = parameters[0].device
    losses = []
    for step, learning_rate in enumerate(learning_rates):
        tokens, targets = (x.to(device) for x in batches[step % len(batches)])
        optimizer.zero_grad(set_to_none=True)
        with computing(precision, device.type):
            loss = model.loss(tokens, targets)
        with computing("fp32" if autocasts(precision) else precision, device.type):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.step()
        losses.append(loss.item())
    return losses
