"""GPT-2 and Llama in the files of other programs: config.json, GGUF's metadata, and the tensors."""

import math
import reprlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from gptjax.models.base import Model
from gptjax.models.gpt2 import GPT2, GPT2Config
from gptjax.models.llama3 import HIGH_TURNS, LOW_TURNS, Llama3, Llama3Config
from gptjax.weights.params import Key


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


class Architecture:
    """An architecture in other programs.

    A subclass defines four functions of the model's config:

    - `required`: values of config.json that gptjax implements, the default first.
    - `to_json`: contents of config.json besides the sizes and the required values.
    - `kinds`: kinds of tensors, in llm.c's order for GPT-2. Their number does not depend on the
      sizes.
    - `metadata`: further keys and values of GGUF files.

    Attributes:
        model: class of the models.
        name: model_type in config.json, and the architecture in GGUF files.
        sizes: fields of the model's config, and their names in config.json.
        optional: as `sizes`, for fields with a default: (name, default).
        prefix: optional prefix of the names in Hugging Face's files.
        transposed: whether Hugging Face's files hold the transpose of gptjax's kernels.
    """

    model: ClassVar[type[Model]]
    name: ClassVar[str]
    sizes: ClassVar[dict[str, str]]
    optional: ClassVar[dict[str, tuple[str, Any]]] = {}
    prefix: ClassVar[str]
    transposed: ClassVar[bool]

    def more(self, found: dict[str, Any]) -> dict[str, Any]:
        """Return fields of the model's config that config.json determines, besides the sizes."""
        return {}

    def config(self, found: dict[str, Any]) -> Any:
        """Return the model's config from the contents of config.json.

        Raises:
            ValueError, TypeError: gptjax does not implement the model.
        """
        if missing := sorted(name for name in self.sizes.values() if found.get(name) is None):
            raise ValueError(f"expected {[*self.sizes.values()]}, missing {missing}")
        fields = {name: found[theirs] for name, theirs in self.sizes.items()}
        fields |= {name: found.get(*entry) for name, entry in self.optional.items()}
        config = self.model.Config(**fields | self.more(found))
        for field, allowed in self.required(config).items():
            expect(field, found.get(field, allowed[0]), allowed)
        return config


def expect(field: str, value: Any, allowed: tuple) -> None:
    """Raise ValueError unless a value in config.json is one of `allowed`, of the same type."""
    if not any(value == choice and type(value) is type(choice) for choice in allowed):
        raise ValueError(
            f"expected {field} to be {' or '.join(map(repr, allowed))}, found "
            f"{reprlib.repr(value)}: gptjax does not compute this model. Use a model of one of "
            f"the types {', '.join(ARCHITECTURES)}"
        )


def config_json(config: Any) -> dict[str, Any]:
    """Return the contents of config.json of a GPT2Config or Llama3Config, without torch_dtype."""
    architecture = of_config(config)
    # GPT-2's end-of-text token is the last id. For other vocabularies, the model does not store it.
    end_of_text = 50256 if config.vocab_size == 50257 else None
    return {
        "model_type": architecture.name,
        **{theirs: getattr(config, ours) for ours, theirs in architecture.sizes.items()},
        **{theirs: getattr(config, ours) for ours, (theirs, _) in architecture.optional.items()},
        **architecture.to_json(config),
        **{name: allowed[0] for name, allowed in architecture.required(config).items()},
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }


def of_config(config: Any) -> Architecture:
    """Return the architecture of a model's config."""
    return next(each for each in ARCHITECTURES.values() if each.model.Config is type(config))


def of_json(found: dict[str, Any]) -> Any:
    """Return the model's config from the contents of config.json. See `Architecture.config`."""
    kind = found.get("model_type", "gpt2")
    expect("model_type", kind, (*ARCHITECTURES,))
    return ARCHITECTURES[kind].config(found)


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


class _GPT2(Architecture):
    model, name, prefix, transposed = GPT2, "gpt2", "transformer.", False
    sizes: ClassVar = {
        "block_size": "n_positions",
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
    }

    kinds = staticmethod(gpt2_kinds)

    def config(self, found: dict[str, Any]) -> GPT2Config:
        return super().config({"n_positions": found.get("n_ctx")} | found)

    def required(self, config: GPT2Config) -> dict[str, tuple]:
        return {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "layer_norm_epsilon": (1e-5,),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
            "tie_word_embeddings": (True,),
            "n_inner": (None, 4 * config.n_embd),
        }

    def to_json(self, config: GPT2Config) -> dict[str, Any]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "n_ctx": config.block_size,
            **{f"{name}_pdrop": 0.0 for name in ("resid", "embd", "attn")},
        }

    def metadata(self, config: GPT2Config) -> dict[str, int | float]:
        return {"feed_forward_length": 4 * config.n_embd, "attention.layer_norm_epsilon": 1e-5}


class _Llama(Architecture):
    """Llama 3, 3.1 and 3.2, and models of the type "llama" that differ in sizes only."""

    model, name, prefix, transposed = Llama3, "llama", "", True
    sizes: ClassVar = {
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
    }
    optional: ClassVar = {
        "n_kv_head": ("num_key_value_heads", None),
        "tie_embeddings": ("tie_word_embeddings", False),
        "norm_eps": ("rms_norm_eps", 1e-6),
        "rope_theta": ("rope_theta", 10_000.0),
    }

    def kinds(self, config: Llama3Config) -> list[Kind]:
        c, d, inner = config.n_embd, config.head_dim, config.n_inner
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

    def more(self, found: dict[str, Any]) -> dict[str, Any]:
        # transformers 5 stores the fields of the rotary embedding in rope_parameters.
        rope = found.get("rope_parameters") or found.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise ValueError(f"expected rope_scaling to be an object, found {reprlib.repr(rope)}")
        fields = {"rope_theta": rope["rope_theta"]} if "rope_theta" in rope else {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        expect("rope_type", kind, ("default", "llama3"))
        if kind == "default":
            return fields
        for name, expected in (("low_freq_factor", LOW_TURNS), ("high_freq_factor", HIGH_TURNS)):
            expect(name, rope.get(name), (expected, int(expected)))
        fields["rope_scaling"] = rope.get("factor")
        fields["rope_original_length"] = rope.get("original_max_position_embeddings")
        return fields

    def required(self, config: Llama3Config) -> dict[str, tuple]:
        return {
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "head_dim": (config.head_dim, None),
        }

    def to_json(self, config: Llama3Config) -> dict[str, Any]:
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
            "rope_scaling": scaling if config.rope_scaling != 1 else None,
        }

    def metadata(self, config: Llama3Config) -> dict[str, int | float]:
        return {
            "feed_forward_length": config.n_inner,
            "attention.head_count_kv": config.kv_heads,
            "attention.layer_norm_rms_epsilon": float(config.norm_eps),
            "rope.freq_base": float(config.rope_theta),
            "rope.dimension_count": config.head_dim,
        }


ARCHITECTURES: dict[str, Architecture] = {each.name: each for each in (_GPT2(), _Llama())}
"""Architectures by model_type."""
