"""GPT-2 124M in bf16: llm.c's recipe, ten billion tokens.

Command:   python train.py --config configs/gpt2_124m.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      about 4.4 hours on one H200, at the 643,700 tokens/s of docs/benchmarks.md
Loss:      not run to its end. llm.c's run of this recipe on FineWeb reached a validation loss of
           6.17 (step 250), 4.32 (1000), 3.63 (3750), 3.40 (9750) and 3.272 (19560).
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.gpt2 import PRESETS
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="gpt2_124m",
    model=replace(PRESETS["gpt2"], precision=Precision("bf16")),
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
