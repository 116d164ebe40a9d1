"""GPT-2 124M in bf16 with NorMuon on a small corpus: 65.5 M tokens.

Command:   python train.py --config configs/gpt2_124m_normuon_docs.py
Data:      docs_corpus, the 16.9 M tokens of docs/benchmarks.md, in a folder of this name in
           data_dir. Another dataset: --dataset NAME.
Hardware:  one H200 or H100 (80 GB)
Time:      138 s on one NVIDIA H200, from the command to its end, at 627,188 tokens/s (runs without
           checkpoints)
Loss:      3.0963 at step 1,000, the mean of 3 seeds (3.0938, 3.1004, 3.0947); 2026-11-24, commits
           71ae0b1, 914275c

docs/training.md has a decay and a rate of the matrices that need fewer steps.
"""

from dataclasses import replace

from gpt2_124m_docs import config as gpt2_124m_docs
from gpt2_124m_normuon import config as gpt2_124m_normuon

config = replace(
    gpt2_124m_docs,
    name="gpt2_124m_normuon_docs",
    optimizer=replace(
        gpt2_124m_normuon.optimizer, learning_rate=2.4e-3, warmup_steps=100, schedule="linear"
    ),
)
