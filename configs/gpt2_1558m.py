"""GPT-2 1558M in bf16: llm.c's recipe, 34 billion tokens, a million tokens per step.

Command:   python train.py --config configs/gpt2_1558m.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      not run to its end. llm.c's run took 24 hours on eight H100 GPUs.
Loss:      not run to its end. For more than 100 shards put other FineWeb shards into one folder and
           name the folder with --dataset.
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.gpt2 import PRESETS
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="gpt2_1558m",
    model=replace(PRESETS["gpt2-xl"], precision=Precision("bf16")),
    optimizer=OptimizerConfig(
        learning_rate=6e-4,
        warmup_steps=700,
        schedule="cosine",
        final_fraction=0.1,
        weight_decay=0.1,
    ),
    dataset="auto",
    batch_tokens=1_048_576,
    micro_batch=8,
    max_steps=32_000,
)
