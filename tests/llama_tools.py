"""Llama 3 from the same random weights in gptjax, in transformers, and in fp64."""

import warnings

import numpy as np
import torch
from reference.torch_gpt2 import flatten, random_params
from torch.nn import functional

from gptjax.models.base import abstract_params
from gptjax.models.llama3 import Llama3Config

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import transformers
from torch_gpt2 import How
from torch_llama import Llama3 as TorchLlama

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


def exact(config, params) -> TorchLlama:
    """bench's PyTorch model in fp64 from our parameters: transformers' computes norms, rotations
    and softmax in fp32."""
    model = TorchLlama(config, How(padded=False)).double()
    flat = flatten(params)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            path = name.replace("weight", "scale" if "norm" in name else "kernel")
            prefix = path.rpartition(".kernel")[0].rpartition(".")[0]
            if name.endswith("attn.qkv.weight"):
                arrays = [flat[f"{prefix}.{part}.kernel"].T for part in "qkv"]
            elif name.endswith("mlp.gate_up.weight"):
                arrays = [flat[f"{prefix}.{part}.kernel"].T for part in ("gate", "up")]
            else:
                array = flat[path]
                array = array.T if path.endswith("kernel") else array
                arrays = [array[: config.vocab_size] if name in ("wte", "lm_head") else array]
            parameter.copy_(torch.from_numpy(np.concatenate(arrays)))
    return model


def exact_gradients(config, model: TorchLlama) -> dict[str, np.ndarray]:
    """The gradients of `exact` under our paths and in our layout."""
    grads = {}
    splits = {"attn.qkv": "q k v", "mlp.gate_up": "gate up"}
    for name, parameter in model.named_parameters():
        grad, stem = parameter.grad.numpy(), name.removesuffix(".weight")
        prefix, part = ".".join(stem.split(".")[:-2]), ".".join(stem.split(".")[-2:])
        if part in splits:
            d = config.head_dim
            sizes = (
                [config.n_head * d, config.kv_heads * d] if part == "attn.qkv" else [config.inner]
            )
            pieces = np.split(grad, np.cumsum(sizes))
            for own, piece in zip(splits[part].split(), pieces, strict=True):
                grads[f"{prefix}.{part.split('.')[0]}.{own}.kernel"] = piece.T
        elif "norm" in name:
            grads[f"{stem}.scale"] = grad
        else:
            grads[name if name in ("wte", "lm_head") else f"{stem}.kernel"] = (
                grad if name in ("wte", "lm_head") else grad.T
            )
    return grads


def exact_logits(model: TorchLlama, tokens):
    """The logits of `exact`, which returns its loss alone."""
    found = []

    def keep(x, scale, eps, head, *rest):
        found.append(functional.linear(functional.rms_norm(x, scale.shape, scale, eps), head))
        return loss(x, scale, eps, head, *rest)

    loss, model.head_loss = model.head_loss, keep
    model(tokens, tokens)
    model.head_loss = loss
    return found[0]
