"""GPT-2 774M in bf16: llm.c's recipe, 150 billion tokens.

Command:   python train.py --config configs/gpt2_774m.py
Data:      prepared FineWeb, python -m gptjax.data fineweb10B --shards 103 (else the embedded
corpus)
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      not run here; llm.c's took 5.6 days on eight A100
Loss:      not measured; data of more than 100 shards needs other FineWeb shards in one folder,
named by --dataset
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.gpt2 import PRESETS
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="gpt2_774m",
    model=replace(PRESETS["gpt2-large"], precision=Precision("bf16")),
    optimizer=OptimizerConfig(
        learning_rate=2.5e-4,
        warmup_steps=700,
        schedule="cosine",
        final_fraction=0.0,
        weight_decay=0.1,
    ),
    dataset="auto",
    batch_tokens=524_288,
    micro_batch=16,
    max_steps=286_102,
)
