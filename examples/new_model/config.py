"""The model of this folder on the standard library's sources: a config for any machine.

Command:   python train.py --config examples/new_model/config.py
Data:      the running Python's standard-library sources, prepared on the first start: no download
Hardware:  any; two CPU cores are enough
"""

from model import RotaryConfig

from gptjax.config import Config, OptimizerConfig

config = Config(
    name="new_model",
    device="auto",
    model=RotaryConfig(vocab_size=257, block_size=128, n_layer=4, n_head=4, n_embd=128),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
    dataset="stdlib_byte",
    sequence_length=128,
    batch_tokens=1024,
    micro_batch=8,
    max_steps=500,
    val_every=125,
    val_tokens=65_536,
    sample_every=250,
    checkpoint_every=125,
)
