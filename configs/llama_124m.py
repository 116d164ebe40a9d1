"""Llama 3 at GPT-2 124M's depth, width and number of parameters, in bf16: ten billion tokens.

Command:   python train.py --config configs/llama_124m.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files. The vocabulary is GPT-2's.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      not run to its end
Loss:      not run to its end. The recipe is the recipe of configs/gpt2_124m.py. With this recipe,
           llm.c's run of GPT-2 124M reached a validation loss of 3.272.
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.llama3 import PRESETS
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="llama_124m",
    model=replace(PRESETS["llama3-124m"], precision=Precision("bf16")),
    optimizer=OptimizerConfig(
        learning_rate=6e-4,
        warmup_steps=700,
        schedule="cosine",
        final_fraction=0.0,
        weight_decay=0.1,
    ),
    dataset="auto",
    batch_tokens=524_288,
    micro_batch=64,
    max_steps=19_560,
)
