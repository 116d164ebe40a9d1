"""The speedrun's model and optimizer (configs/speedrun_pr233.py) on a small corpus: one epoch.

Command:   python train.py --config configs/speedrun_docs.py
Data:      docs_corpus, the 16.9 M tokens of docs/benchmarks.md, in a folder of this name in
           data_dir. Another dataset: --dataset NAME.
Hardware:  one H200; a step needs 29.1 GiB. On two or four GPUs: --micro-batch 2 or 1.
Time:      231 s, of which 47 s of compilation
Loss:      3.0617, seed 0; 2026-11-24, commit f85193a

configs/gpt2_124m_docs.py and configs/gpt2_124m_normuon_docs.py train GPT-2 124M on 3.9 epochs. The
speedrun's model would memorize the corpus: its embedding tables have 425 M parameters.

512 steps of 32,768 tokens on average, in the record's proportions: an eighth of the tokens of the
record's steps, the same windows. matrix_learning_rate is the best one of
benchmarks/results/speedrun/compare.json, where the other learning rates have the same factor; here,
they are the record's. Documents are not cut: cut to the record's lengths, the corpus has a quarter
of its tokens. Sequences are shuffled: the corpus has documents of up to 485,791 tokens, which in
order would fill many steps one by one.
"""

from dataclasses import replace

from speedrun_pr233 import config as speedrun_pr233
from speedrun_pr233 import stages

STEPS, TOKENS = (170, 340, 498, 512), (16_384, 32_768, 49_152, 49_152)
LENGTHS = tuple(tokens // 4 for tokens in TOKENS)

config = replace(
    speedrun_pr233,
    name="speedrun_docs",
    optimizer=replace(
        speedrun_pr233.optimizer,
        matrix_learning_rate=0.016,
        cooldown_steps=299,
        final_steps=14,
        momentum_warmup_steps=102,
        momentum_cooldown_steps=18,
    ),
    dataset="docs_corpus",
    data_order="shuffled",
    batch_tokens=32_768,
    sequence_length=32_768,  # of validation
    micro_batch=4,
    max_steps=512,
    stages=stages(STEPS, TOKENS, LENGTHS, (None,) * 4, untied_from=340),
    val_every=100,
    val_tokens=655_360,
)
