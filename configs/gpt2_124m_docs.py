"""GPT-2 124M in bf16 with AdamW on a small corpus: 65.5 M tokens.

Command:   python train.py --config configs/gpt2_124m_docs.py
Data:      docs_corpus, the 16.9 M tokens of docs/benchmarks.md, in a folder of this name in
           data_dir. Another dataset: --dataset NAME.
Hardware:  one H200 or H100 (80 GB)
Time:      134 s on one NVIDIA H200, from the command to its end, at 650,024 tokens/s (runs without
           checkpoints)
Loss:      3.4677 at step 1,000, the mean of 3 seeds (3.4602, 3.4713, 3.4715); 2026-11-24, commits
           71ae0b1, b13d2ab

With 100 steps of warm-up, the mean loss is 3.5625, and runs differ more (docs/precision.md). A
schedule and a rate with a lower loss are in docs/training.md.
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
