"""GPT-2 124M in TF32: llm.c's recipe, fp32 storage and TF32 matmuls.

Command:   python train.py --config configs/gpt2_124m_tf32.py
Data:      FineWeb: python -m gptjax.data fineweb10B --shards 103. Without FineWeb the run uses the
           standard library's source files.
Hardware:  one H200 or H100 (80 GB), or up to eight of them
Time:      about 11 hours on one H200, at the 265,700 tokens/s of docs/benchmarks.md
           (micro-batch of 32)
Loss:      not run to its end. llm.c's run of this recipe on FineWeb reached a validation loss of
           6.17 (step 250), 4.32 (1000), 3.63 (3750), 3.40 (9750) and 3.272 (19560).
"""

from dataclasses import replace

from gpt2_124m import config as gpt2_124m

from gptjax.precision import Precision

config = replace(
    gpt2_124m,
    name="gpt2_124m_tf32",
    model=replace(gpt2_124m.model, precision=Precision("tf32")),
    micro_batch=16,
)
