"""Fine-tune a published Llama 3, 3.1 or 3.2, or any Llama of Hugging Face, in bf16.

Command:   python train.py --config configs/llama_finetune.py --init-from llama_hf --dataset own
           --model.block-size 8192
           The shape is the other model's. A smaller block size is the longest sequence afterwards.
Data:      your text with the model's tokenizer: python -m gptjax.data text book.txt
           --tokenizer llama_hf --name own
Hardware:  one H200 or H100 (80 GB) for Llama 3.2 1B. AdamW needs 16 bytes for a parameter; with
           several GPUs, --parallel fsdp shards them.
Time:      not run at this size
Loss:      not run at this size
"""

from gptjax.config import Config
from gptjax.models.llama3 import Llama3Config
from gptjax.optim import OptimizerConfig
from gptjax.precision import Precision

config = Config(
    name="llama_finetune",
    model=Llama3Config(precision=Precision("bf16")),
    optimizer=OptimizerConfig(
        learning_rate=2e-5,
        warmup_steps=20,
        schedule="cosine",
        final_fraction=0.1,
        weight_decay=0.0,
    ),
    dataset="auto",
    batch_tokens=65_536,
    micro_batch=8,
    max_steps=200,
    val_every=50,
    val_tokens=262_144,
    checkpoint_every=100,
)
