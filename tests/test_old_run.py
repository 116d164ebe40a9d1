"""A run of commit f85193a, whose checkpoint has digests of arrays: its weights are read, and it
resumes with the losses that this commit computed."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import losses, run

import gptjax
from gptjax.config import Config
from gptjax.data import fixed_batches
from gptjax.optim import OptimizerConfig
from gptjax.weights.checkpoint_files import checksum

FIXTURES = Path(__file__).parent / "fixtures"
# Loss and gradient norm of steps 5 to 8.
LATER = {
    5: (float.fromhex("0x1.546E2A0000000p2"), float.fromhex("0x1.E9FE8E0000000p-1")),
    6: (float.fromhex("0x1.50FC6C0000000p2"), float.fromhex("0x1.041D0E0000000p0")),
    7: (float.fromhex("0x1.4EFB2C0000000p2"), float.fromhex("0x1.032A520000000p0")),
    8: (float.fromhex("0x1.4E3E680000000p2"), float.fromhex("0x1.FB375A0000000p-1")),
}


def test_its_weights_are_read():
    model, tokenizer = gptjax.load(FIXTURES / "old_run")
    log = map(json.loads, (FIXTURES / "old_run" / "log.jsonl").read_text().splitlines())
    (logged,) = (row["loss"] for row in log if row["kind"] == "val" and row["step"] == 4)
    shards = [FIXTURES / "letters" / "letters_val_000000.bin"]
    batches = fixed_batches(shards, sequence_length=8, batch=4, count=2)
    inputs, targets = (
        jnp.asarray(np.concatenate(part)) for part in [*zip(*batches, strict=True)][:2]
    )
    assert tokenizer.name == "byte"
    assert float(jax.jit(gptjax.loss_fn)(model, inputs, targets)) == pytest.approx(logged, 1e-6)


def test_it_resumes(tmp_path, one_device, optax_promotion):
    shutil.copytree(FIXTURES / "old_run", tmp_path / "old_run")
    path = tmp_path / "old_run" / "checkpoints" / "4" / "meta" / "metadata"
    saved = json.loads(path.read_text())
    saved["config"]["executable_cache"] = True  # an option that no longer exists
    path.write_text(json.dumps(saved | {"checksum": checksum(saved)}))
    sizes = {"block_size": 8, "n_layer": 1, "n_head": 1, "n_embd": 4}
    config = Config(
        name="old_run",
        runs_dir=tmp_path,
        device="cpu",
        max_steps=8,
        model=gptjax.GPT2Config(vocab_size=257, padded_vocab_size=257, **sizes),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule_steps=8),
        dataset=str(FIXTURES / "letters"),
        sequence_length=8,
        batch_tokens=64,
        micro_batch=4,
        val_every=0,
        sample_every=0,
        checkpoint_every=0,
    )
    code, shown = run(config)
    assert code == 0 and "resuming from step 4" in shown
    for step, expected in LATER.items():
        assert losses(config)[step][:2] == pytest.approx(expected, 1e-5)
