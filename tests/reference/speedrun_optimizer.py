"""The optimizer of modded-nanogpt's pull request #233 in PyTorch, from its equations: a matrix at a
time, without kernels, in the dtype of the model."""

import torch
from reference.normuon import torch_step

# Factor of the learning rate of each matrix, apart from that of its shape.
NORMUON = {"attention_bank": 1, "mlp_in": 1, "mlp_out": 2}
# Betas, and factors of the learning rate and of the decay.
ADAM = {
    "lm_head": (0.5, 0.95, 1, 150),
    "embed": (0.5, 0.95, 1, 150),
    "values": (0.75, 0.95, 75, 5),
    "bigram": (0.75, 0.95, 75, 5),
    "smear_gate": (0.9, 0.99, 0.01, 0),
    "skip_gate": (0.9, 0.99, 0.05, 0),
    "attention_gates": (0.9, 0.99, 1, 1),
    "value_gates": (0.9, 0.99, 1, 1),
    "smear_lambda": (0.9, 0.99, 5, 0),
    "skip_lambda": (0.9, 0.99, 5, 0),
    "backout_lambda": (0.9, 0.99, 5, 0),
    "qkvo_lambdas": (0.9, 0.99, 5, 0),
    "residual_lambdas": (0.9, 0.95, 5, 0),
    "x0_lambdas": (0.9, 0.95, 1, 0),
    "bigram_lambdas": (0.9, 0.95, 1, 0),
    "mlp_lambdas": (0.9, 0.95, 1, 0),
    "lane_lambdas": (0.9, 0.95, 1, 0),
}
MATRIX_LR, MATRIX_DECAY, ADAM_LR, ADAM_DECAY, EPS = 0.023, 1.2, 0.008, 0.005, 1e-10


class RecordOptimizer:
    """NorMuon for the matrices at every step, Adam for the others at odd steps.

    Args:
        parameters: name → parameter of `TorchSpeedrun`; matrices are the last two axes.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        zeros = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.sums = {name: torch.zeros_like(p) for name, p in zeros.items()}
        self.m, self.v = zeros, {name: torch.zeros_like(p) for name, p in zeros.items()}
        for name in NORMUON:
            rows, columns = zeros[name].shape[-2:]
            self.v[name] = zeros[name].mean(-1 if rows >= columns else -2, keepdim=True)

    @torch.no_grad()
    def step(self, k, rate, beta, tied):
        """Update the parameters with the gradients of step k, and clear them.

        Args:
            rate: the learning rates' schedule at this step.
            beta: the momentum at this step.
            tied: whether the embedding is the transposed head.
        """
        head, embed = self.parameters["lm_head"], self.parameters["embed"]
        if tied:
            head.grad += embed.grad.T
        for name, p in self.parameters.items():
            self.sums[name] += p.grad
            if name in NORMUON:
                for index in torch.cartesian_prod(*map(torch.arange, p.shape[:-2])).tolist():
                    at = tuple(index) if isinstance(index, list) else index
                    lr, state = rate * MATRIX_LR, (self.sums, self.m, self.v)
                    how = {"beta": beta, "lr": lr * NORMUON[name], "decay": MATRIX_DECAY * lr}
                    torch_step(p[at], *(x[name][at] for x in state), **how)
                self.sums[name].zero_()
            elif k % 2 == 1:
                if not (tied and name == "embed"):
                    self.adam(name, (k + 1) // 2, rate * ADAM_LR)
                self.sums[name].zero_()
            p.grad = None
        if tied and k % 2 == 1:
            embed.copy_(head.T)
            self.m["embed"], self.v["embed"] = (
                self.m["lm_head"].T.clone(),
                self.v["lm_head"].T.clone(),
            )

    def adam(self, name, t, lr):
        b1, b2, lr_factor, decay_factor = ADAM[name]
        p, g, lr = self.parameters[name], self.sums[name], lr * lr_factor
        self.m[name] = b1 * self.m[name] + (1 - b1) * g
        self.v[name] = b2 * self.v[name] + (1 - b2) * g**2
        mean, square = self.m[name] / (1 - b1**t), self.v[name] / (1 - b2**t)
        update = lr * mean / (square.sqrt() + EPS)
        p -= update + lr**2 * ADAM_DECAY * decay_factor * p * (update * p > 0)
