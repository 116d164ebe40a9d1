"""GPT-2 and Llama in the files of other programs: config.json, GGUF's metadata, and the tensors."""

import json
import math
import reprlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gptjax.models.base import Model
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.models.llama3 import HIGH_TURNS, LOW_TURNS, Llama3, Llama3Config
from gptjax.weights.errors import WeightsError
from gptjax.weights.files import file_size, reason, shown
from gptjax.weights.params import Key

# The header of a GPT-2 of 1,000 layers takes 2 MB. Parsed JSON takes many times the length of its
# text.
MAX_JSON_BYTES = 16 << 20


class Kind(NamedTuple):
    """A tensor of the model, or the same tensor of every block.

    Attributes:
        key: path of the parameter; for blocks, path in the block.
        name: name in Hugging Face's files; {} is the number of the block.
        gguf: name in GGUF files.
        shape: shape of one parameter, without padding.
        layers: number of blocks; None for a tensor outside the blocks.
    """

    key: Key
    name: str
    gguf: str
    shape: tuple[int, ...]
    layers: int | None = None

    @property
    def size(self) -> int:
        """Number of elements of one tensor."""
        return math.prod(self.shape)

    def each(self) -> Iterator[tuple[Key, str, str]]:
        """Yield key, name and GGUF name of every tensor of the kind."""
        if self.layers is None:
            yield self.key, self.name, self.gguf
        for layer in range(self.layers or 0):
            key = ("blocks", layer, *self.key)
            yield key, self.name.format(layer), self.gguf.format(layer)


class Architecture(NamedTuple):
    """An architecture in other programs.

    Attributes:
        model: class of the models.
        model_type: value in config.json.
        sizes: fields of the model's config, and their names in config.json.
        decided: further fields of the model's config that config.json determines.
        more: function of the file and the object in config.json: further fields of the config.
        required: function of the config: values of config.json that gptjax implements. The first is
            the default of a missing field.
        to_json: function of the config: contents of config.json besides the common fields.
        kinds: function of the config: the kinds of tensors, in llm.c's order for GPT-2. The length
            of the list does not depend on the sizes.
        prefix: optional prefix of the names in Hugging Face's files.
        transposed: whether Hugging Face's files hold the transpose of gptjax's kernels.
        gguf: name of the architecture in GGUF files.
        metadata: function of the config: further GGUF keys, and values.
    """

    model: type[Model]
    model_type: str
    sizes: dict[str, str]
    decided: tuple[str, ...]
    more: Callable[[Path, dict], dict[str, Any]]
    required: Callable[[Any], dict[str, tuple]]
    to_json: Callable[[Any], dict[str, Any]]
    kinds: Callable[[Any], list[Kind]]
    prefix: str
    transposed: bool
    gguf: str
    metadata: Callable[[Any], dict[str, int | float]]


def expect(file: Path, field: str, value: Any, allowed: tuple) -> None:
    """Raise WeightsError unless a value in config.json is one of `allowed`, of the same type."""
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise WeightsError(
            f"{shown(file)}: expected {field} to be {' or '.join(map(repr, allowed))}, found "
            f"{reprlib.repr(value)}: gptjax does not compute this model. Use a model of one of "
            f"the types {', '.join(ARCHITECTURES)}"
        )


def read_json(file: Path, missing: str) -> dict[str, Any]:
    """Return the object in a JSON file; `missing` says what to do if there is no file."""
    if (size := file_size(file, missing=missing)) > MAX_JSON_BYTES:
        raise WeightsError(
            f"{shown(file)}: expected at most {MAX_JSON_BYTES} bytes of JSON, found {size}"
        )
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise WeightsError(
            f"{shown(file)}: expected JSON: {reason(error)}. Download or export the model again"
        ) from error
    if not isinstance(found, dict):
        raise WeightsError(f"{shown(file)}: expected a JSON object, found {type(found).__name__}")
    return found


def config_json(config: Any) -> dict[str, Any]:
    """Return the contents of config.json of a GPT2Config or Llama3Config."""
    architecture = of_config(config)
    # GPT-2's end-of-text token is the last id. For other vocabularies, the model does not store it.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    return {
        "model_type": architecture.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in architecture.sizes.items()},
        **architecture.to_json(config),
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "use_cache": True,
        "torch_dtype": "float32",
    }


def of_config(config: Any) -> Architecture:
    """Return the architecture of a model's config."""
    kinds = {architecture.model.Config: architecture for architecture in ARCHITECTURES.values()}
    return kinds[type(config)]


# GPT-2: key in a block, name in Hugging Face's and in GGUF files, and shape in multiples of n_embd.
_GPT2_BLOCK: tuple[tuple[Key, str, str, tuple[int, ...]], ...] = (
    (("ln_1", "scale"), "ln_1.weight", "attn_norm.weight", (1,)),
    (("ln_1", "bias"), "ln_1.bias", "attn_norm.bias", (1,)),
    (("attn", "c_attn", "kernel"), "attn.c_attn.weight", "attn_qkv.weight", (1, 3)),
    (("attn", "c_attn", "bias"), "attn.c_attn.bias", "attn_qkv.bias", (3,)),
    (("attn", "c_proj", "kernel"), "attn.c_proj.weight", "attn_output.weight", (1, 1)),
    (("attn", "c_proj", "bias"), "attn.c_proj.bias", "attn_output.bias", (1,)),
    (("ln_2", "scale"), "ln_2.weight", "ffn_norm.weight", (1,)),
    (("ln_2", "bias"), "ln_2.bias", "ffn_norm.bias", (1,)),
    (("mlp", "c_fc", "kernel"), "mlp.c_fc.weight", "ffn_up.weight", (1, 4)),
    (("mlp", "c_fc", "bias"), "mlp.c_fc.bias", "ffn_up.bias", (4,)),
    (("mlp", "c_proj", "kernel"), "mlp.c_proj.weight", "ffn_down.weight", (4, 1)),
    (("mlp", "c_proj", "bias"), "mlp.c_proj.bias", "ffn_down.bias", (1,)),
)


def gpt2_kinds(config: GPT2Config) -> list[Kind]:
    """Return the kinds of GPT-2's tensors."""
    c = config.n_embd
    return [
        Kind(("wte",), "wte.weight", "token_embd.weight", (config.vocab_size, c)),
        Kind(("wpe",), "wpe.weight", "position_embd.weight", (config.block_size, c)),
        *(
            Kind(key, f"h.{{}}.{name}", f"blk.{{}}.{gguf}", tuple(n * c for n in s), config.n_layer)
            for key, name, gguf, s in _GPT2_BLOCK
        ),
        Kind(("ln_f", "scale"), "ln_f.weight", "output_norm.weight", (c,)),
        Kind(("ln_f", "bias"), "ln_f.bias", "output_norm.bias", (c,)),
    ]


def _gpt2_required(config: GPT2Config) -> dict[str, tuple]:
    return {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "layer_norm_epsilon": (1e-5,),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
        "tie_word_embeddings": (True,),
        "n_inner": (None, 4 * config.n_embd),
    }


def _gpt2_json(config: GPT2Config) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_ctx": config.block_size,
        "reorder_and_upcast_attn": False,
        **{name: allowed[0] for name, allowed in _gpt2_required(config).items()},
        **{f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")},
    }


def _gpt2_metadata(config: GPT2Config) -> dict[str, int | float]:
    return {"feed_forward_length": 4 * config.n_embd, "attention.layer_norm_epsilon": 1e-5}


def llama_kinds(config: Llama3Config) -> list[Kind]:
    """Return the kinds of Llama's tensors."""
    c, d, inner = config.n_embd, config.head_dim, config.inner
    heads, kv, vocabulary = config.n_head * d, config.kv_heads * d, (config.vocab_size, c)

    def block(key: Key, name: str, gguf: str, *shape: int) -> Kind:
        name, gguf = f"model.layers.{{}}.{name}.weight", f"blk.{{}}.{gguf}.weight"
        return Kind(key, name, gguf, shape, config.n_layer)

    kinds = [
        Kind(("wte",), "model.embed_tokens.weight", "token_embd.weight", vocabulary),
        block(("norm_1", "scale"), "input_layernorm", "attn_norm", c),
        block(("attn", "q", "kernel"), "self_attn.q_proj", "attn_q", c, heads),
        block(("attn", "k", "kernel"), "self_attn.k_proj", "attn_k", c, kv),
        block(("attn", "v", "kernel"), "self_attn.v_proj", "attn_v", c, kv),
        block(("attn", "o", "kernel"), "self_attn.o_proj", "attn_output", heads, c),
        block(("norm_2", "scale"), "post_attention_layernorm", "ffn_norm", c),
        block(("mlp", "gate", "kernel"), "mlp.gate_proj", "ffn_gate", c, inner),
        block(("mlp", "up", "kernel"), "mlp.up_proj", "ffn_up", c, inner),
        block(("mlp", "down", "kernel"), "mlp.down_proj", "ffn_down", inner, c),
        Kind(("norm", "scale"), "model.norm.weight", "output_norm.weight", (c,)),
    ]
    head = Kind(("lm_head",), "lm_head.weight", "output.weight", vocabulary)
    return kinds if config.tie_embeddings else [*kinds, head]


def _llama_fields(file: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the config besides the sizes.

    transformers 5 stores the fields of the rotary embedding in rope_parameters.
    """
    rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise WeightsError(
            f"{shown(file)}: expected rope_scaling to be an object, found {reprlib.repr(rope)}"
        )
    fields = {
        "n_kv_head": found.get("num_key_value_heads"),
        "tie_embeddings": found.get("tie_word_embeddings", False),
        "norm_eps": found.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", found.get("rope_theta", 10_000.0)),
    }
    kind = rope.get("rope_type", rope.get("type", "default"))
    expect(file, "rope_type", kind, ("default", "llama3"))
    if kind == "default":
        return fields
    for name, expected in (("low_freq_factor", LOW_TURNS), ("high_freq_factor", HIGH_TURNS)):
        expect(file, name, rope.get(name), (expected, int(expected)))
    fields["rope_scaling"] = rope.get("factor")
    fields["rope_original_length"] = rope.get("original_max_position_embeddings")
    return fields


def _llama_required(config: Llama3Config) -> dict[str, tuple]:
    return {
        "hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "head_dim": (config.head_dim, None),
    }


def _llama_json(config: Llama3Config) -> dict[str, Any]:
    # Names of transformers 4, which transformers 5 and other programs also read.
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope_scaling,
        "low_freq_factor": LOW_TURNS,
        "high_freq_factor": HIGH_TURNS,
        "original_max_position_embeddings": config.rope_original_length,
    }
    return {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": config.n_kv_head,
        "attention_dropout": 0.0,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling if config.rope_scaling != 1 else None,
        "tie_word_embeddings": config.tie_embeddings,
        **{name: allowed[0] for name, allowed in _llama_required(config).items()},
    }


def _llama_metadata(config: Llama3Config) -> dict[str, int | float]:
    return {
        "feed_forward_length": config.inner,
        "attention.head_count_kv": config.kv_heads,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_dim,
    }


_SAME = ("vocab_size", "n_layer", "n_head", "n_embd")

ARCHITECTURES = {
    "gpt2": Architecture(
        model=GPT2,
        model_type="gpt2",
        sizes={"block_size": "n_positions"} | {name: name for name in _SAME},
        decided=(),
        more=lambda file, found: {},
        required=_gpt2_required,
        to_json=_gpt2_json,
        kinds=gpt2_kinds,
        prefix="transformer.",
        transposed=False,
        gguf="gpt2",
        metadata=_gpt2_metadata,
    ),
    "llama": Architecture(
        model=Llama3,
        model_type="llama",
        sizes={
            "vocab_size": "vocab_size",
            "block_size": "max_position_embeddings",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_embd": "hidden_size",
            "n_inner": "intermediate_size",
        },
        decided=(
            *("n_kv_head", "tie_embeddings", "norm_eps"),
            *("rope_theta", "rope_scaling", "rope_original_length"),
        ),
        more=_llama_fields,
        required=_llama_required,
        to_json=_llama_json,
        kinds=llama_kinds,
        prefix="",
        transposed=True,
        gguf="llama",
        metadata=_llama_metadata,
    ),
}
"""Architectures by model_type. Llama 3, 3.1 and 3.2, and other models of the type "llama" that
differ in sizes only."""
