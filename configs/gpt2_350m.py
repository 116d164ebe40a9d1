"""GPT-2 350M in bf16: llm.c's recipe, 31 billion tokens.

Command:   python train.py --config configs/gpt2_350m.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      not run to its end. llm.c's run took 13.7 hours on eight A100 GPUs.
Loss:      not run to its end. For more than 100 shards put other FineWeb shards into one folder and
           name the folder with --dataset.
"""

from dataclasses import replace

from gpt2_124m import config as gpt2_124m

from gptjax.models.gpt2 import PRESETS
from gptjax.precision import Precision

config = replace(
    gpt2_124m,
    name="gpt2_350m",
    model=replace(PRESETS["gpt2-medium"], precision=Precision("bf16")),
    optimizer=replace(gpt2_124m.optimizer, learning_rate=3e-4),
    micro_batch=32,
    max_steps=60_000,
)
