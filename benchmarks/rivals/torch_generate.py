"""Generation with transformers as its documentation recommends for speed: a static cache, which
makes `generate` compile the decoding step into a CUDA graph.

Weights are random and in the dtype of the precision. The cache is created once: a new one would be
captured in a new graph at each call.
"""

import time
import warnings
from typing import Any

import torch
from torch_gpt2 import free_torch
from transformers import AutoConfig, AutoModelForCausalLM, StaticCache

from gptjax.models.base import ModelConfig
from gptjax.weights.architectures import config_json


class TorchGeneration:
    """Continuations of random prompts.

    Args:
        config: the model's shape and precision.
        batch, prompt, new: sequences, tokens of each prompt, and new tokens of each.
        device: "cuda" or "cpu"; `generate` does not compile on a CPU.
    """

    def __init__(self, config: ModelConfig, *, batch: int, prompt: int, new: int, device: str):
        precision = config.precision.plain
        # A model of another batch size would be compiled for dynamic sizes.
        torch._dynamo.reset()
        torch.set_float32_matmul_precision("highest" if precision == "fp32" else "high")
        # A text of random weights must not end early.
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        # `for_model` has the type of the model as an argument of its own.
        fields = config_json(config) | ids
        hf_config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float32
        torch.manual_seed(0)
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(hf_config)
            self.prompt_BT = torch.randint(0, hf_config.vocab_size, (batch, prompt))
        self.model, self.device, self.new = model.to(dtype).eval(), device, new
        self.cache = StaticCache(config=hf_config, max_cache_len=prompt + new)

    def generate(self, new: int, temperature: float, top_k: int | None) -> torch.Tensor:
        """Return the prompts and `new` tokens of each."""
        drawn = {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
        self.cache.reset()
        with warnings.catch_warnings():
            # transformers 6.0 removes the name; older versions have no other name.
            warnings.filterwarnings("ignore", "`past_key_values` is deprecated", FutureWarning)
            return self.model.generate(
                self.prompt_BT,
                attention_mask=torch.ones_like(self.prompt_BT),
                max_new_tokens=new,
                past_key_values=self.cache,
                do_sample=temperature > 0,
                **(drawn if temperature > 0 else {}),
            )

    def kernel(self) -> str:
        """Return the cache and the compilation in words."""
        return "static cache, " + ("compile" if self.device == "cuda" else "eager")

    def all_tokens(self, **how: Any) -> float:
        """Return the seconds of one call for all tokens."""
        return self._seconds(self.new, **how)

    def first_token(self, **how: Any) -> float:
        """Return the seconds of a call for one token."""
        return self._seconds(1, **how)

    def _seconds(self, new: int, **how: Any) -> float:
        started = time.perf_counter()
        out_BT = self.generate(new, **how)
        if self.device == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
        expected = (len(self.prompt_BT), self.prompt_BT.shape[1] + new)
        assert out_BT.shape == expected, f"expected tokens {expected}, got {tuple(out_BT.shape)}"
        return taken

    def free(self) -> None:
        """Release the model and its memory."""
        del self.model, self.cache
        torch._dynamo.reset()  # the compiled functions hold the parameters, too
        free_torch()
