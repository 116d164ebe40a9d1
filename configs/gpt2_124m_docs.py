"""GPT-2 124M in bf16 with AdamW on a small corpus: 65.5 M tokens.

Command:   python train.py --config configs/gpt2_124m_docs.py
Data:      docs_corpus, the 16.9 M tokens of docs/measurements.md, in a folder of this name in
           data_dir. Another dataset: --dataset NAME.
Hardware:  one H200 or H100 (80 GB)
Time:      136 s on one NVIDIA H200, from the command to its end, at 649,349 tokens/s (runs without
           checkpoints)
Loss:      3.5625 at step 1,000, the mean of 3 seeds (3.5567, 3.5732, 3.5575); 2026-11-23, commits
           185c88d, 1c04753
"""

from dataclasses import replace

from gpt2_124m import config as gpt2_124m

config = replace(
    gpt2_124m,
    name="gpt2_124m_docs",
    optimizer=replace(gpt2_124m.optimizer, learning_rate=1e-3, warmup_steps=300),
    dataset="docs_corpus",
    batch_tokens=65_536,
    max_steps=1_000,
    val_every=100,
    val_tokens=655_360,
    sample_every=0,
)
