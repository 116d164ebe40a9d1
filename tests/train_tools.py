"""Runs of train.py on a small model, in this process and as commands."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from saved_run_tools import restored

from gptjax import devices
from gptjax.config import Config
from gptjax.data import write_shard
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import OptimizerConfig
from gptjax.parallel import data_mesh
from gptjax.weights import checkpoint_files

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
train_py = importlib.util.module_from_spec(spec)
# its source is part of its programs' keys, as that of the running script is
sys.modules["train"] = train_py
spec.loader.exec_module(train_py)


@pytest.fixture(scope="session")
def words(tmp_path_factory):
    """A small text-like corpus of bytes: words of a tiny language, so that there is something to
    learn."""
    folder, rng = tmp_path_factory.mktemp("words"), np.random.default_rng(0)
    known = [bytes(rng.integers(97, 123, rng.integers(2, 6)).tolist()) + b" " for _ in range(30)]
    text = np.frombuffer(b"".join(known[i] for i in rng.integers(0, 30, 8000)), np.uint8)
    manifest = {"format": 1, "tokenizer": "byte", "vocab_size": 257, "eot": 256, "source": "test"}
    manifest["shards"] = {}
    for name, begin, end in (
        ("words_train_000001.bin", 0, 12_000),
        ("words_train_000002.bin", 12_000, 24_000),
        ("words_val_000000.bin", 24_000, 28_000),
    ):
        write_shard(folder / name, text[begin:end].astype(np.uint16))
        manifest["shards"][name] = {"tokens": end - begin, "max_token": int(text.max())}
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def one_device(monkeypatch):
    """Where a run would find two CPU devices, one."""
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:1], None))


@pytest.fixture(scope="session")
def program_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def program_cache(program_folder):
    """A compilation cache for the runs of all files, and JAX's own setting again afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(program_folder))
        yield program_folder
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def config(tmp_path, words, one_device, program_cache, optax_promotion):
    """A run of 20 steps on one device."""
    return Config(
        name="run",
        runs_dir=tmp_path / "runs",
        max_steps=20,
        device="cpu",
        model=GPT2Config(
            vocab_size=257, padded_vocab_size=264, block_size=32, n_layer=1, n_head=2, n_embd=32
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        dataset=str(words),
        sequence_length=32,
        batch_tokens=512,
        micro_batch=4,
        val_every=10,
        val_tokens=1024,
        sample_every=10,
        checkpoint_every=6,
    )


def run(config: Config) -> tuple[int, str]:
    """Exit code and what was shown."""
    shown = []
    code = train_py.train(config, lambda line: shown.append(f"{line}\n"))
    return code, "".join(shown)


@pytest.fixture
def alone(config, program_folder) -> Config:
    """A complete, uninterrupted run of `config`, which the tests share: only the first runs it."""
    alone = dataclasses.replace(config, runs_dir=program_folder / "runs", name="alone")
    assert run(alone)[0] == 0
    return alone


def rows(config: Config, kind: str) -> dict[int, dict]:
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if row["kind"] == kind}


def losses(config: Config) -> dict[int, tuple]:
    train = rows(config, "train").items()
    return {step: (row["loss"], row["grad_norm"], row["lr"]) for step, row in train}


def last_state(config: Config) -> list[np.ndarray]:
    """Every array of the newest checkpoint."""
    tx = config.build_optimizer(data_mesh(jax.devices("cpu")[:1]))
    abstract = jax.eval_shape(lambda: train_py.init_state(config.model, tx, config.seed))
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    state = restored(config.run_dir / "checkpoints", steps_kept(config)[-1], like)
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def check_same(config: Config, alone: Config) -> None:
    """Check that losses and last state are those of another run."""
    assert losses(config) == losses(alone)
    both = zip(last_state(config), last_state(alone), strict=True)
    assert all(np.array_equal(a, b) for a, b in both)


def same_as(alone: Config, config: Config, says: str) -> str:
    """Resume a run; check that losses and state are those of the undisturbed run."""
    code, shown = run(config)
    assert code == 0 and says in shown
    assert [*losses(config)] == [*range(1, config.max_steps + 1)]
    check_same(config, alone)
    return shown


def steps_kept(config: Config) -> list[int]:
    return sorted(checkpoint_files.steps(config.run_dir / "checkpoints"))


def command_line(config: Config, tmp_path: Path, *more: str) -> list[str]:
    """The same run as a command."""
    file, names = tmp_path / "config.py", ("vocab_size", "padded_vocab_size", "block_size")
    names += ("n_layer", "n_head", "n_embd")
    shape = {name: getattr(config.model, name) for name in names}
    file.write_text(
        "from gptjax import Config, GPT2Config\nfrom pathlib import Path\n"
        f"config = Config(name='run', device='cpu', runs_dir=Path({str(config.runs_dir)!r}), "
        "max_steps=12,\n"
        f"  model=GPT2Config(**{shape}), dataset={config.dataset!r}, sequence_length=32, "
        "batch_tokens=512, micro_batch=8,\n"
        "  val_every=0, sample_every=0, checkpoint_every=4)\n"
    )
    return [sys.executable, str(ROOT / "train.py"), "--config", str(file), *more]
