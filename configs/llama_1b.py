"""Llama 3.2 1B's shape with GPT-2's vocabulary, in bf16: 34 billion tokens, a million per step.

Command:   python train.py --config configs/llama_1b.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files. For more than 100 shards put other FineWeb shards into
           one folder and name the folder with --dataset.
Hardware:  one H200, or up to eight of them
Time:      not run to its end
Loss:      not run to its end. The recipe is the recipe of configs/gpt2_1558m.py; the micro-batch is
           an estimate from the activations of a layer. Llama 3.2 1B has a vocabulary of 128,256 and
           a context of 131,072 tokens, and was not trained with this recipe.
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.llama3 import PRESETS
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="llama_1b",
    model=replace(PRESETS["llama3-1b"], precision=Precision("bf16")),
    optimizer=OptimizerConfig(
        learning_rate=6e-4,
        warmup_steps=700,
        schedule="cosine",
        final_fraction=0.1,
        weight_decay=0.1,
    ),
    dataset="auto",
    batch_tokens=1_048_576,
    micro_batch=32,
    max_steps=32_000,
)
