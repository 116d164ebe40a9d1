"""The speedrun's model and optimizer (configs/speedrun_pr233.py) on a small corpus: 65.5 M tokens.

Command:   python train.py --config configs/speedrun_docs.py
Data:      docs_corpus, the 16.9 M tokens of docs/measurements.md, in a folder of this name in
           data_dir. Another dataset: --dataset NAME.
Hardware:  one H200 (141 GB). On two or four GPUs: --micro-batch 2 or 1.
Time:      not run to its end
Loss:      not run to its end

configs/gpt2_124m_docs.py and configs/gpt2_124m_normuon_docs.py train GPT-2 124M on as many tokens
in as many steps.

1,000 steps of 65,536 tokens on average, in the record's proportions: a quarter of the tokens of the
record's steps, the same windows and learning rates. Documents are not cut: cut to the record's
lengths, the corpus has a quarter of its tokens.
"""

from dataclasses import replace

from speedrun_pr233 import config as speedrun_pr233
from speedrun_pr233 import stages

STEPS, TOKENS = (334, 666, 972, 1_000), (32_768, 65_536, 98_304, 98_304)
LENGTHS = tuple(tokens // 4 for tokens in TOKENS)

config = replace(
    speedrun_pr233,
    name="speedrun_docs",
    model=replace(speedrun_pr233.model, block_size=24_576),
    optimizer=replace(
        speedrun_pr233.optimizer,
        cooldown_steps=584,
        final_steps=28,
        momentum_warmup_steps=200,
        momentum_cooldown_steps=34,
        eps=1e-10 / 32_768,
    ),
    dataset="docs_corpus",
    batch_tokens=65_536,
    sequence_length=8_192,  # of validation
    micro_batch=4,
    max_steps=1_000,
    stages=stages(STEPS, TOKENS, LENGTHS, (None,) * 4, untied_from=666),
    val_every=100,
    val_tokens=655_360,
)
