"""The model of modded-nanogpt's pull request #233 in PyTorch, after its train_gpt.py, for the tests
to compare with. The code is written for reading, not for speed.

One sequence at a time: nothing but the batch's mean connects two sequences. Shapes: T time, C
channels, H heads, D = C/H, F channels of the MLP, V vocabulary, without padding. Norms, softmax and
loss are at least fp32, and fp64 in an fp64 model.
"""

import itertools
import math

import numpy as np
import torch
from torch import nn
from torch.nn.functional import linear

EPS = torch.finfo(torch.float32).eps


def norm(x):
    """RMSNorm without parameters."""
    x = _at_least_fp32(x)
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + EPS)


def bigram_index(tokens, rows):
    """The row of each bigram's embedding: a hash of the token and the one before, in int32, which
    wraps. The index of the first token is the last row. The record writes it into the array of
    tokens before it hashes the others, so it is also the predecessor of the second token."""
    index = tokens.to(torch.int32).clone()
    index[0] = rows - 1
    index[1:] = torch.remainder((36313 * index[1:]) ^ (27191 * index[:-1]), rows - 1)
    return index.long()


def rotary(windows, head_dim):
    """The frequencies and the scale of the softmax after the long window grew through `windows`."""
    pairs = head_dim // 4
    frequencies = [(1 / 1024) ** (i / max(1, pairs - 1)) for i in range(pairs)]
    scale = 0.1
    for old, new in itertools.pairwise(windows):
        s = old / new
        for i, f in enumerate(frequencies):
            rotations = old * f / (2 * math.pi)
            kept = min(1.0, max(0.0, (rotations - 1) / 31))
            frequencies[i] = f * (s + kept * (1 - s))
        scale *= 0.2 * math.log(new / old) + 1
    return frequencies, scale


def rotate(x, frequencies, paired):
    """Rotate the channels (2i, 2i+1) of the first half of each head by −position · frequency i.

    Of paired heads, the even ones have the position 2t, the odd ones 2t + 1."""
    x = _at_least_fp32(x)
    half, (time, heads) = x.shape[-1] // 2, x.shape[:2]
    position = torch.arange(time)[:, None].expand(time, heads)
    if paired:
        position = 2 * position + torch.arange(heads) % 2
    angle = position[:, :, None] * torch.tensor(frequencies, dtype=x.dtype)
    a, b = x[..., 0:half:2], x[..., 1:half:2]
    cos, sin = angle.cos(), angle.sin()
    rotated = torch.stack([cos * a + sin * b, cos * b - sin * a], -1).flatten(-2)
    return torch.cat([rotated, x[..., half:]], -1)


def attend(q, k, v, document, window, scale):
    """Softmax attention over the query itself and at most `window` positions before it."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    scores = _at_least_fp32(q @ k.transpose(1, 2)) * scale
    t = torch.arange(q.shape[1])
    back = t[:, None] - t[None, :]
    visible = (back >= 0) & (back <= window) & (document[:, None] == document[None, :])
    weights = torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)
    return (weights.to(v.dtype) @ v).transpose(0, 1)


class TorchSpeedrun(nn.Module):
    """The model. `config` says the sizes; `residual` is the dtype of the residual stream."""

    def __init__(self, config, residual=None):
        super().__init__()
        self.config, self.residual = config, residual
        v, c, h, f = config.vocab_size, config.n_embd, config.n_head, config.n_inner
        layers, values = config.n_layer, len(config.value_layers)
        shapes = {
            "embed": (v, c),
            "lm_head": (c, v),
            "bigram": (config.bigram_rows, c),
            "values": (values, v, c),
            "attention_bank": (layers - 1, 4, c, c),
            "mlp_in": (layers, f, c),
            "mlp_out": (layers, f, c),
            "smear_gate": (12,),
            "skip_gate": (12,),
            "attention_gates": (layers - 1, h, 12),
            "value_gates": (values, h, 12),
            "smear_lambda": (),
            "skip_lambda": (),
            "backout_lambda": (),
            "qkvo_lambdas": (layers - 1, 2),
            "residual_lambdas": (layers, 2),
            "x0_lambdas": (layers,),
            "bigram_lambdas": (layers,),
            "mlp_lambdas": (config.lanes_from,),
            "lane_lambdas": (layers - config.lanes_from, 2, 2),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))

    def attention(self, i, x, tokens, document):
        config, stage = self.config, self.config.stage
        long = i in config.long_layers
        window = stage.long_window if long else stage.short_window
        frequencies, scale = rotary(stage.rotary_windows, config.head_dim)
        bank = i - (i > config.skip[1])  # one layer has no attention
        in_lambda, out_lambda = self.qkvo_lambdas[bank]
        q, k, v = (
            linear(x, in_lambda * weight).view(len(x), config.n_head, config.head_dim)
            for weight in self.attention_bank[bank, :3]
        )
        q, k = norm(q), norm(k)
        paired = i in config.paired_layers
        q, k = rotate(q, frequencies, paired), rotate(k, frequencies, paired)
        if i in config.value_layers:
            j = config.value_layers.index(i)
            value = self.values[j][tokens]
            seen = x[:, :12] if paired else torch.cat([x[:, :6], value[:, :6].to(x.dtype)], dim=-1)
            gate = 2 * torch.sigmoid(_at_least_fp32(linear(seen, self.value_gates[j])))
            v = _at_least_fp32(v) + gate[:, :, None] * value.view(v.shape)
        if paired:
            # (T, 3, 2, D) in memory becomes (2T, 3, D): heads 0 to 2, then 3 to 5 of each token.
            q, k, v = (
                y.reshape(2 * len(x), config.n_head // 2, config.head_dim) for y in (q, k, v)
            )
            document = document.repeat_interleave(2)
        if long:
            half = config.head_dim // 2
            before = torch.cat([k[:1], k[:-1]])
            k = torch.cat([k[..., :half], before[..., half:]], -1)
        y = attend(q, k, v, document, window, scale).reshape(len(x), config.n_head, config.head_dim)
        gate = torch.sigmoid(_at_least_fp32(linear(x[:, :12], self.attention_gates[bank])))
        y = (y * gate[:, :, None]).flatten(1)
        return linear(y, out_lambda * self.attention_bank[bank, 3])

    def mlp(self, i, x):
        hidden = torch.relu(linear(x, self.mlp_in[i])) ** 2
        return hidden @ self.mlp_out[i]

    def hidden(self, tokens, document):
        """The output of the last norm for one sequence; `document` is the number of each token's
        document."""
        config = self.config
        dtype = self.residual or self.embed.dtype
        x = self.embed[tokens]
        gate = torch.sigmoid(_at_least_fp32(linear(x[1:, :12], self.smear_gate[None])))
        x = torch.cat([x[:1], x[1:] + self.smear_lambda * gate * x[:-1]])
        x0 = norm(x).to(dtype)
        bigram = self.bigram[bigram_index(tokens, config.bigram_rows)].to(dtype)

        def injection(i):
            # The bigram of layer 0 is in lane 0 from the start.
            return self.x0_lambdas[i] * x0 + (self.bigram_lambdas[i] * bigram if i else 0)

        lane0 = (x0 + self.bigram_lambdas[0] * bigram).to(dtype)
        for i in range(config.lanes_from):
            attention_lambda, mlp_lambda = self.residual_lambdas[i]
            if i == config.skip[1]:
                lane0 = (lane0 + skip).to(dtype)
            else:
                attention = self.attention(i, norm(lane0), tokens, document)
                lane0 = (attention_lambda * lane0 + attention + injection(i)).to(dtype)
            if i == config.skip[0]:
                gate = _at_least_fp32(linear(x0[:, :12], self.skip_gate[None]))
                skip = torch.sigmoid(self.skip_lambda) * 2 * torch.sigmoid(gate) * lane0
                skip = skip.to(dtype)
            mlp = self.mlp(i, norm(lane0))
            lane0 = (mlp_lambda * lane0 + self.mlp_lambdas[i] * mlp).to(dtype)

        lane1 = lane0
        for i in range(config.lanes_from, config.n_layer):
            attention_lambda, mlp_lambda = self.residual_lambdas[i]
            to_lanes = self.lane_lambdas[i - config.lanes_from]
            attention = self.attention(i, norm(lane0), tokens, document)
            lane0 = attention_lambda * lane0 + to_lanes[0, 0] * attention + injection(i)
            lane1 = attention_lambda * lane1 + to_lanes[0, 1] * attention
            lane0, lane1 = lane0.to(dtype), lane1.to(dtype)
            mlp = self.mlp(i, norm(lane1))
            lane0 = (mlp_lambda * lane0 + to_lanes[1, 0] * mlp).to(dtype)
            lane1 = (mlp_lambda * lane1 + to_lanes[1, 1] * mlp).to(dtype)
            if i == config.lanes_from:
                early = lane0
        return norm(((lane0 + lane1) / 2 - self.backout_lambda * early).to(dtype))

    def forward(self, tokens, documents):
        """The soft-capped logits."""
        rows = zip(tokens, documents, strict=True)
        logits = torch.stack([self.hidden(*row) @ self.lm_head for row in rows])
        return 23 * torch.sigmoid((_at_least_fp32(logits) + 5) / 7.5)

    def losses(self, logits, targets, token_weights):
        """The loss of each token: it predicts the next token and those after it, one by one."""
        losses = torch.zeros(targets.shape, dtype=logits.dtype)
        time = targets.shape[1]
        for b in range(len(targets)):
            for t in range(time):
                lse = torch.logsumexp(logits[b, t], -1)
                for k, weight in enumerate(token_weights):
                    if t + k < time:
                        losses[b, t] += weight * (lse - logits[b, t, targets[b, t + k]])
        return losses


def from_params(config, params: dict, *, dtype=torch.float32, residual=None) -> TorchSpeedrun:
    """A model with the weights of ours, without the padding of the vocabulary."""
    model, v = TorchSpeedrun(config, residual).to(dtype), config.vocab_size
    assert params.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(np.array(unpadded(name, params[name], v))))
    return model


def unpadded(name: str, array, vocab_size: int):
    """A parameter or its gradient without the padding of the vocabulary."""
    match name:
        case "embed":
            return array[:vocab_size]
        case "lm_head":
            return array[:, :vocab_size]
        case "values":
            return array[:, :vocab_size]
    return array


def _at_least_fp32(x):
    return x.to(torch.promote_types(x.dtype, torch.float32))
