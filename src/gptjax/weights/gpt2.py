"""GPT-2's tensors in the files of Hugging Face and llm.c."""

import dataclasses
import math
from collections.abc import Iterator

from gptjax.models.gpt2 import GPT2Config
from gptjax.weights.params import Key

SIZES = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd")
"""Fields of `GPT2Config` that a file determines, in the order of llm.c's header."""

GGUF_NAMES = {
    "wte.weight": "token_embd.weight",
    "wpe.weight": "position_embd.weight",
    "ln_f.weight": "output_norm.weight",
    "ln_f.bias": "output_norm.bias",
}
"""GGUF names of tensors outside the blocks, by the name in Hugging Face's files."""

GGUF_BLOCK_NAMES = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
"""GGUF names of the layers of a block, by the name in Hugging Face's files."""

# Key in a block, name in Hugging Face's files, and shape in multiples of n_embd, in llm.c's order.
BLOCK_TENSORS: tuple[tuple[Key, str, tuple[int, ...]], ...] = (
    (("ln_1", "scale"), "ln_1.weight", (1,)),
    (("ln_1", "bias"), "ln_1.bias", (1,)),
    (("attn", "c_attn", "kernel"), "attn.c_attn.weight", (1, 3)),
    (("attn", "c_attn", "bias"), "attn.c_attn.bias", (3,)),
    (("attn", "c_proj", "kernel"), "attn.c_proj.weight", (1, 1)),
    (("attn", "c_proj", "bias"), "attn.c_proj.bias", (1,)),
    (("ln_2", "scale"), "ln_2.weight", (1,)),
    (("ln_2", "bias"), "ln_2.bias", (1,)),
    (("mlp", "c_fc", "kernel"), "mlp.c_fc.weight", (1, 4)),
    (("mlp", "c_fc", "bias"), "mlp.c_fc.bias", (4,)),
    (("mlp", "c_proj", "kernel"), "mlp.c_proj.weight", (4, 1)),
    (("mlp", "c_proj", "bias"), "mlp.c_proj.bias", (1,)),
)


@dataclasses.dataclass(frozen=True)
class TensorKind:
    """A tensor of the model, or the same tensor of every block.

    Attributes:
        key: path of the parameter; for blocks, path in the block.
        name: name in Hugging Face's files; for blocks, name in the block.
        shape: shape of one tensor.
        layers: number of blocks; None for a tensor outside the blocks.
    """

    key: Key
    name: str
    shape: tuple[int, ...]
    layers: int | None = None

    @property
    def size(self) -> int:
        """Number of elements of one tensor."""
        return math.prod(self.shape)

    def each(self) -> Iterator[tuple[Key, str]]:
        """Yield key and name of every tensor of the kind."""
        if self.layers is None:
            yield self.key, self.name
        for layer in range(self.layers or 0):
            yield ("blocks", layer, *self.key), f"h.{layer}.{self.name}"


def tensor_kinds(config: GPT2Config) -> list[TensorKind]:
    """Return the kinds of tensors in llm.c's order.

    The length of the list does not depend on the sizes, and no tensor is allocated.
    """
    c = config.n_embd
    return [
        TensorKind(("wte",), "wte.weight", (config.padded_vocab_size, c)),
        TensorKind(("wpe",), "wpe.weight", (config.block_size, c)),
        *(
            TensorKind(key, name, tuple(n * c for n in shape), config.n_layer)
            for key, name, shape in BLOCK_TENSORS
        ),
        TensorKind(("ln_f", "scale"), "ln_f.weight", (c,)),
        TensorKind(("ln_f", "bias"), "ln_f.bias", (c,)),
    ]
