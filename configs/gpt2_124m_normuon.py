"""GPT-2 124M in bf16 with NorMuon: the recipe of gpt2_124m.py in a sixth of its steps.

Command:   python train.py --config configs/gpt2_124m_normuon.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 18. Without FineWeb the run uses the
           standard library's source files.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      about three quarters of an hour on one H200, at AdamW's 643,700 tokens/s. A NorMuon
           update takes 2.5 ms more than AdamW's, in steps of 0.8 s.
Loss:      not run to its end. modded-nanogpt's optimizer track reaches a validation loss of 3.28
           on FineWeb with this learning rate, decay and number of steps. With AdamW, the same loss
           needs some 19,500 steps.
"""

from dataclasses import replace

from gptjax.config import Config
from gptjax.models.gpt2 import PRESETS
from gptjax.optim import NorMuonConfig
from gptjax.precision import Precision

config = Config(
    name="gpt2_124m_normuon",
    model=replace(PRESETS["gpt2"], precision=Precision("bf16")),
    optimizer=NorMuonConfig(
        matrix_learning_rate=0.035,
        matrix_weight_decay=0.025,
        learning_rate=6e-4,
        weight_decay=0.1,
        warmup_steps=100,
        schedule="wsd",
    ),
    dataset="auto",
    batch_tokens=524_288,
    micro_batch=64,
    max_steps=3_250,
)
