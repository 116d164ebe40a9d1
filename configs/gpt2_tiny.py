"""A small byte-level GPT-2 that learns Python on any machine: the first run to try.

Command:   python train.py --config configs/gpt2_tiny.py
Data:      the source files of Python's standard library, prepared on the first start, no download
Hardware:  any; two CPU cores are enough
Time:      a minute and a half on two CPU cores
Loss:      validation loss 1.83 nats per byte at the end (2.37 at step 250); at most 2.2 on any
           machine
"""

from gptjax.config import Config
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import OptimizerConfig

config = Config(
    name="gpt2_tiny",
    device="auto",
    model=GPT2Config(
        vocab_size=257, padded_vocab_size=384, block_size=128, n_layer=4, n_head=4, n_embd=128
    ),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50),
    dataset="stdlib_byte",
    sequence_length=128,
    batch_tokens=1024,
    micro_batch=8,
    max_steps=1000,
    val_every=250,
    val_tokens=65_536,
    sample_every=500,
    checkpoint_every=250,
)
