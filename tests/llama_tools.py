"""Llama 3 from the same random weights in gptjax, and in transformers in fp32 and in fp64."""

import contextlib
from unittest import mock

import numpy as np
import torch
from comparison_tools import flatten, random_params
from hf_tools import transformers
from torch.nn import functional

from gptjax.models.base import abstract_params
from gptjax.models.llama3 import Llama3Config

# A prime vocabulary, three query heads for one key head, an odd length, frequencies in all three
# ranges of Llama 3.1's scaling.
ODD = Llama3Config(
    vocab_size=61,
    block_size=33,
    n_layer=2,
    n_head=3,
    n_kv_head=1,
    n_embd=48,
    n_inner=56,
    rope_scaling=8.0,
    rope_original_length=16,
)
NAMES = {
    "wte": "model.embed_tokens",
    "norm.scale": "model.norm",
    "lm_head": "lm_head",
    "norm_1.scale": "input_layernorm",
    "norm_2.scale": "post_attention_layernorm",
    **{f"attn.{name}.kernel": f"self_attn.{name}_proj" for name in "qkvo"},
    **{f"mlp.{name}.kernel": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}


def random_of(config, seed=0):
    params = random_params(abstract_params(config), config.vocab_size, seed)
    for name in {"wte", "lm_head"} & params.keys():
        params[name][config.vocab_size :] = 0
    return params


def in_pytorch(config, flat: dict) -> dict[str, torch.Tensor]:
    """Our arrays by path under transformers' names and in PyTorch's layout, without padding."""
    tensors = {}
    for path, array in flat.items():
        prefix, _, rest = path.partition("blocks.")
        layer, _, name = rest.partition(".")
        name = f"model.layers.{layer}.{NAMES[name]}" if rest else NAMES[prefix]
        array = np.asarray(array)
        if path.endswith("kernel"):
            array = array.T
        elif path in ("wte", "lm_head"):
            array = array[: config.vocab_size]
        tensors[f"{name}.weight"] = torch.from_numpy(np.array(array))
    return tensors


def theirs(config, params) -> transformers.LlamaForCausalLM:
    """transformers' model, in fp32, from our parameters."""
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling != 1:
        rope |= {"rope_type": "llama3", "factor": config.rope_scaling}
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
        rope |= {"original_max_position_embeddings": config.rope_original_length}
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.n_embd,
            intermediate_size=config.n_inner,
            num_hidden_layers=config.n_layer,
            num_attention_heads=config.n_head,
            num_key_value_heads=config.n_kv_head,
            max_position_embeddings=config.block_size,
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            tie_word_embeddings=config.tie_embeddings,
            attn_implementation="eager",
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    tensors = in_pytorch(config, flatten(params))
    if config.tie_embeddings:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    return model


class WithLoss(torch.nn.Module):
    """transformers' model as `reference.torch_train.train` calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def loss(self, tokens, targets):
        logits = self.model(tokens).logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@contextlib.contextmanager
def in_fp64():
    """transformers computes norms, rotations and softmax in fp32, by name."""
    names = mock.patch.multiple(torch, float32=torch.float64, float=torch.float64)
    with names, mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        yield


def run_theirs(config, params, tokens, targets):
    """Logits, loss and gradients of transformers' model, under its names."""
    model = theirs(config, params).to(torch.float32)  # fp64 within `in_fp64`
    tokens, targets = (torch.from_numpy(x).long() for x in (tokens, targets))
    logits = model(tokens).logits
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    grads = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return logits.detach().numpy(), loss.item(), grads
