"""docs/extending*.md: the model and the optimizer of the pages train, save and generate."""

import dataclasses
import re
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from generation_tools import forward
from train_tools import rows, run

import gptjax
from gptjax.data import open_shard

DOCS = Path(__file__).parents[1] / "docs"


def example(page, monkeypatch):
    """Run the first Python block of a page as a module, and return the module."""
    text = (DOCS / page).read_text(encoding="utf-8")
    block = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)[0]
    module = types.ModuleType(page.removesuffix(".md"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(block, page, "exec"), module.__dict__)
    return module


def test_the_smallest_model_and_the_optimizer_train(config, monkeypatch):
    bigram = example("extending.md", monkeypatch).BigramConfig
    model = bigram(vocab_size=257, block_size=32, n_layer=1, n_head=1, n_embd=16)
    optimizer = example("extending_optimizer.md", monkeypatch).LionConfig(
        learning_rate=3e-2, warmup_steps=2, weight_decay=0.0
    )
    code, text = run(dataclasses.replace(config, model=model, optimizer=optimizer, max_steps=12))
    assert code == 0 and "lion: lr 0.03, decay 0" in text
    assert rows(config, "val")[12]["loss"] < rows(config, "val")[0]["loss"] - 0.5
    assert rows(config, "sample").keys() == {10, 12}
    loaded, _ = gptjax.load(config.run_dir)
    assert type(loaded).__name__ == "Bigram"


def test_the_changed_gpt2_trains_samples_and_ignores_the_position(config, monkeypatch):
    page = example("extending_change.md", monkeypatch)
    model = page.SiluConfig(vocab_size=257, block_size=32, n_layer=1, n_head=2, n_embd=16)
    code, text = run(dataclasses.replace(config, model=model, max_steps=10))
    assert code == 0 and "Silu, " in text and "linear: xla" in text
    assert "mlp: " not in text  # its MLP is no call of the operation
    assert 10 in rows(config, "sample")
    loaded, _ = gptjax.load(config.run_dir)
    assert type(loaded) is page.SiluGPT2
    # With one kind of token, only a position could distinguish the outputs.
    logits_TV = np.asarray(forward(loaded, jnp.full((1, 8), 65)))[0]
    np.testing.assert_allclose(logits_TV, logits_TV[:1].repeat(8, axis=0), rtol=0, atol=1e-5)


def test_the_dataset_has_the_documents(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = example("extending_data.md", monkeypatch)
    dataset = page.dataset
    tokens = np.concatenate([open_shard(path) for path in (*dataset.train, *dataset.val)])
    assert dataset.train_tokens + dataset.val_tokens == len(tokens)
    assert (tokens == 256).sum() == 200
    found = bytes(tokens[tokens < 256].astype(np.uint8).tolist())
    assert all(text.encode() in found for text in page.poems)
