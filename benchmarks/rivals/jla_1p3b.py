"""The shape transformer-1p3b of jax-linear-attention (package jla), whose trainer it is compared
with: 65,536 tokens a step in sequences of 4,096.

Command:   python -m gptjax.bench step --config benchmarks/rivals/jla_1p3b.py --precision bf16 fp8
Hardware:  one H100 (80 GB)
"""

from gptjax.config import Config
from gptjax.models.llama3 import Llama3Config
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="jla_1p3b",
    model=Llama3Config(
        vocab_size=128_256,
        block_size=4096,
        n_layer=24,
        n_head=32,
        n_kv_head=8,
        n_embd=2048,
        n_inner=5632,
        precision=Precision("bf16"),
    ),
    optimizer=OptimizerConfig(learning_rate=6e-4),
    dataset="auto",
    batch_tokens=65_536,
    sequence_length=4096,
    micro_batch=4,
    max_steps=1_000,
)
