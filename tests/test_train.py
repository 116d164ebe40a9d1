"""train.py as a user meets it: a run from beginning to end, interruptions, and every mistake's
message."""

import dataclasses
import importlib.util
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from rich.console import Console

from gptjax import devices
from gptjax.config import OUTSIDE_PROGRAMS, Config, ConfigError
from gptjax.data import DatasetError, ShardError, write_shard
from gptjax.models.gpt2 import GPT2Config
from gptjax.optim import OptimizerConfig, switch_algorithm
from gptjax.training import compilation, programs, progress
from gptjax.training import step as step_module
from pallas_kernels import _dispatch

ROOT = Path(__file__).parent.parent
spec = importlib.util.spec_from_file_location("train", ROOT / "train.py")
train_py = importlib.util.module_from_spec(spec)
# its source is part of its programs' keys, as that of the running script is
sys.modules["train"] = train_py
spec.loader.exec_module(train_py)

pytestmark = pytest.mark.usefixtures("optax_promotion")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A small text-like corpus of bytes: words of a tiny language, so that there is something to
    learn."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    words = [bytes(rng.integers(97, 123, rng.integers(2, 6)).tolist()) + b" " for _ in range(30)]
    text = np.frombuffer(b"".join(words[i] for i in rng.integers(0, 30, 8000)), np.uint8).astype(
        np.uint16
    )
    write_shard(folder / "words_train_000001.bin", text[:12_000])
    write_shard(folder / "words_train_000002.bin", text[12_000:24_000])
    write_shard(folder / "words_val_000000.bin", text[24_000:28_000])
    manifest = {"format": 1, "tokenizer": "byte", "vocab_size": 257, "eot": 256, "source": "test"}
    manifest["shards"] = {
        "words_train_000001.bin": {"tokens": 12_000, "max_token": int(text.max())},
        "words_train_000002.bin": {"tokens": 12_000, "max_token": int(text.max())},
        "words_val_000000.bin": {"tokens": 4_000, "max_token": int(text.max())},
    }
    (folder / "dataset.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def one_device(monkeypatch):
    """Where a run would find two CPU devices, one."""
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:1], None))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A compilation cache for the runs of this file, and JAX's own setting again afterwards."""
    yield tmp_path_factory.mktemp("cache")
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture
def config(tmp_path, corpus, one_device, cache):
    return Config(
        name="run",
        runs_dir=tmp_path / "runs",
        max_steps=20,
        device="cpu",
        model=GPT2Config(
            vocab_size=257, padded_vocab_size=264, block_size=32, n_layer=2, n_head=2, n_embd=32
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5),
        dataset=str(corpus),
        sequence_length=32,
        batch_tokens=512,
        micro_batch=4,
        val_every=10,
        val_tokens=1024,
        sample_every=10,
        sample_tokens=8,
        checkpoint_every=6,
        compilation_cache=cache,
    )


def run(config: Config) -> tuple[int, str]:
    """Exit code and what was shown."""
    shown = io.StringIO()
    code = train_py.train(config, Console(file=shown, width=200))
    return code, shown.getvalue()


def rows(config: Config, kind: str) -> dict[int, dict]:
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    return {row["step"]: row for row in map(json.loads, lines) if row["kind"] == kind}


def losses(config: Config) -> dict[int, tuple]:
    return {
        step: (row["loss"], row["grad_norm"], row["lr"])
        for step, row in rows(config, "train").items()
    }


def last_state(config: Config) -> list[np.ndarray]:
    """Every array of the newest checkpoint."""
    tx = config.build_optimizer(train_py.sharding.data_mesh(jax.devices("cpu")[:1]))
    abstract = jax.eval_shape(lambda: train_py.init_state(config.model, tx, config.seed))
    device = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract)
    checkpoints = train_py.Checkpoints(config.run_dir / "checkpoints")
    state = checkpoints.restore(checkpoints.latest_step(), like)
    checkpoints.close()
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def steps_kept(config: Config) -> list[int]:
    return sorted(
        int(p.name) for p in (config.run_dir / "checkpoints").iterdir() if p.name.isdigit()
    )


# -------------------------------------------------------------------------------------- a whole run


def test_a_run_from_beginning_to_end(config):
    code, shown = run(config)
    assert code == 0
    for part in (
        "device",
        "precision",
        "kernels     attention: xla, norm: xla, mlp: xla, loss: xla",
        "parameters",
        "GiB for a step",
        "sample ⟨",
    ):
        assert part in shown
    train, val, sample = (rows(config, kind) for kind in ("train", "val", "sample"))
    assert (
        list(train) == list(range(1, 21)) and list(val) == [0, 10, 20] and list(sample) == [10, 20]
    )
    assert (
        val[0]["loss"] == pytest.approx(np.log(257), abs=0.5)
        and val[20]["loss"] < val[0]["loss"] - 2
    )
    fields = {"kind", "step", "tokens", "loss", "lr", "grad_norm", "ms", "tokens_per_second", "mfu"}
    assert (
        fields <= train[20].keys()
        and train[20]["tokens"] == 20 * 512
        and train[15]["tokens_per_second"] > 0
    )
    assert steps_kept(config) == [18, 20]
    assert (config.run_dir / "loss.png").stat().st_size > 10_000
    assert list(config.run_dir.glob("events.out.tfevents.*"))
    before = (config.run_dir / "log.jsonl").read_bytes()
    code, shown = run(config)
    assert (
        code == 0
        and "is complete" in shown
        and (config.run_dir / "log.jsonl").read_bytes() == before
    )


@pytest.mark.parametrize("algorithm", ["adamw", "normuon"])
def test_a_schedule_with_its_own_end_lets_a_run_be_prolonged(config, algorithm):
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(
            switch_algorithm(config.optimizer, algorithm), schedule_steps=20
        ),
    )
    whole = dataclasses.replace(config, name="whole")
    run(whole)
    run(dataclasses.replace(config, max_steps=9))
    code, shown = run(config)
    assert code == 0 and "resuming from step 9" in shown
    assert losses(config) == losses(whole)
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(config), last_state(whole), strict=True)
    )


def test_two_devices_learn_what_one_does_and_go_on_from_its_checkpoint(config, monkeypatch):
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20), sample_every=0
    )
    alone = dataclasses.replace(config, name="alone")
    run(alone)
    run(dataclasses.replace(config, max_steps=6))
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:2], None))
    code, shown = run(config)
    assert code == 0 and "2 × cpu" in shown and "resuming from step 6" in shown
    for step, (loss, *_) in losses(alone).items():
        assert losses(config)[step][0] == pytest.approx(loss, rel=2e-4), step


def test_overfitting_one_batch(config):
    config = dataclasses.replace(
        config, overfit_one_batch=True, max_steps=150, val_every=0, sample_every=0
    )
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.0)
    )
    run(config)
    assert losses(config)[150][0] < 0.1


def test_a_step_is_dispatched_before_the_metrics_of_the_one_before_are_read(config, monkeypatch):
    config = dataclasses.replace(
        config, max_steps=5, val_every=0, sample_every=0, checkpoint_every=0
    )
    events = []
    real_compile, real_get = compilation.compile_to_fit, jax.device_get

    def compile_and_watch(*args):
        step = real_compile(*args)
        return lambda *a: events.append("dispatch") or step(*a)

    monkeypatch.setattr(train_py, "compile_to_fit", compile_and_watch)
    monkeypatch.setattr(train_py, "needed_bytes", lambda compiled: 0)
    monkeypatch.setattr(train_py.jax, "device_get", lambda x: events.append("read") or real_get(x))
    run(config)
    assert events == [
        "dispatch",
        "dispatch",
        "read",
        "dispatch",
        "read",
        "dispatch",
        "read",
        "dispatch",
        "read",
        "read",
        "read",  # the digests of the checkpoint
    ]


@pytest.mark.parametrize("device_count", [1, 2])
def test_a_second_run_finds_its_programs_and_learns_the_same(
    config, tmp_path, monkeypatch, device_count
):
    monkeypatch.setattr(devices, "select", lambda kind: (jax.devices("cpu")[:device_count], None))
    # sources may be edited while tests run
    monkeypatch.setattr(programs, "_process_began", lambda: np.inf)
    compilation_cache.reset_cache()  # of other tests' folder
    first = dataclasses.replace(
        config, compilation_cache=tmp_path / "cache", max_steps=4, val_every=0, sample_every=0
    )
    second = dataclasses.replace(first, name="second", checkpoint_every=0, val_every=2, log_every=1)
    other_seed = dataclasses.replace(second, name="seed", seed=1)
    other_rate = dataclasses.replace(config.optimizer, learning_rate=2e-2)
    assert "(0 of 2 programs found whole, miss" in run(first)[1]
    traced = []
    with monkeypatch.context() as patch:
        patch.setattr(step_module, "loss_fn", lambda *_: traced.append("loss"))
        for config in (second, other_seed):
            shown = run(config)[1]
            assert "(2 of 2 programs found whole, hit" in shown and not traced, re.findall(
                "compiled .*", shown
            )
    assert losses(first) == losses(second) and losses(other_seed)[1] != losses(first)[1]
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(first), last_state(second), strict=True)
    )
    shown = run(dataclasses.replace(first, name="rate", optimizer=other_rate))[1]
    assert "(0 of 2 programs found whole" in shown


def test_no_program_depends_on_what_is_left_out_of_its_key(config, monkeypatch):
    """All the fields that `made_into_programs` leaves out, changed at once, change nothing that XLA
    is given."""

    def lowered(config: Config) -> list[str]:
        texts = []

        class Recorder(compilation.Compiler):
            def start(self, lowerable, *abstract):
                texts.append(lowerable.lower(*abstract).as_text())
                return super().start(lowerable, *abstract)

        monkeypatch.setattr(train_py, "Compiler", Recorder)
        run(config)
        return texts

    plain = dataclasses.replace(
        config, max_steps=2, val_every=1, checkpoint_every=0, compilation_cache=None
    )
    plain = dataclasses.replace(
        plain, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
    )
    changes = {
        "name": "other", "runs_dir": config.runs_dir / "other", "max_steps": 3, "resume": "never",
        "seed": 5, "dataset": "words", "data_dir": Path(config.dataset).parent, "tokenizer": "byte",
        "overfit_one_batch": True, "val_every": 2, "val_tokens": 512, "sample_every": 2,
        "sample_tokens": 4, "checkpoint_every": 2, "keep_last": 1, "keep_every": 2, "log_every": 1,
        "compilation_cache": config.compilation_cache, "resume_with_changes": True,
    }  # fmt: skip
    (Path(config.dataset).parent / "words").symlink_to(config.dataset)
    assert changes.keys() == OUTSIDE_PROGRAMS
    assert all(getattr(plain, name) != value for name, value in changes.items())
    expected = lowered(plain)
    assert len(expected) == 2
    assert lowered(dataclasses.replace(plain, **changes)) == expected
    other = dataclasses.replace(plain.optimizer, learning_rate=3e-2)
    assert lowered(dataclasses.replace(plain, name="rate", optimizer=other)) != expected


# ------------------------------------------------------------------------------------ interruptions


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_stops_and_the_same_command_goes_on_bit_for_bit(
    config, monkeypatch, number
):
    alone = dataclasses.replace(config, name="alone")
    run(alone)
    real = train_py.RunLog.write

    def interrupt(self, kind, step, tokens, **fields):
        real(self, kind, step, tokens, **fields)
        if kind == "train" and step == 9:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(train_py.RunLog, "write", interrupt)
        code, shown = run(config)
    assert code == 128 + number and f"stopped by {number.name} at step" in shown
    (stopped_at,) = {steps_kept(config)[-1]}
    assert 9 <= stopped_at < 20
    code, shown = run(config)
    assert code == 0 and f"resuming from step {stopped_at}" in shown
    assert losses(config) == losses(alone)
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(config), last_state(alone), strict=True)
    )


def test_kill_9_in_training_and_while_saving(tmp_path):
    out = tmp_path / "kills.json"
    command = [
        sys.executable,
        ROOT / "benchmarks" / "experiments" / "attacks" / "kills.py",
        "--trials",
        "2",
        "--seed",
        "1",
        "--out",
        out,
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(out.read_text())["counts"] == {"bit-exact": 2}


def test_nan_stops_the_run_names_the_step_and_keeps_the_checkpoint(config):
    run(
        dataclasses.replace(
            config, max_steps=6, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
        )
    )
    good = last_state(config)
    # The weights of the checkpoint are fine; the data is not: an id beyond the table makes the loss
    # NaN.
    bad = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            train_py.sharding,
            "put",
            lambda sharding, x: jax.device_put(np.where(x == x, 9999, x), sharding),
        )
        with pytest.raises(
            train_py.NotFiniteError, match=r"step 7: loss nan.*checkpoint of step 6 is kept"
        ):
            run(bad)
    assert steps_kept(config) == [6]
    assert all(np.array_equal(a, b) for a, b in zip(last_state(config), good, strict=True))
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    assert [row for row in map(json.loads, lines) if row["kind"] == "event"][-1][
        "event"
    ] == "not finite"

    # Each of the two pieces of advice is taken.
    slower = dataclasses.replace(bad.optimizer, learning_rate=1e-3)
    with pytest.raises(ConfigError, match="--resume-with-changes"):
        run(dataclasses.replace(bad, optimizer=slower))
    skipping = dataclasses.replace(bad.optimizer, skip_loss_z=5.0, skip_grad_norm_z=5.0)
    for max_steps, optimizer in ((8, slower), (9, skipping)):
        code, shown = run(
            dataclasses.replace(
                bad, optimizer=optimizer, max_steps=max_steps, resume_with_changes=True
            )
        )
        assert code == 0 and "changed     optimizer." in shown
    lines = (config.run_dir / "log.jsonl").read_text().splitlines()
    starts = [row for row in map(json.loads, lines) if row.get("event") == "start"]
    assert starts[-2]["changes"] == {"optimizer.learning_rate": [1e-2, 1e-3]}
    assert {"optimizer.skip_loss_z", "optimizer.skip_grad_norm_z"} <= starts[-1]["changes"].keys()


def poisoned(monkeypatch, steps):
    """Make the loss and gradients of the given steps NaN."""
    real = step_module.loss_and_grads

    def make(graphdef, tx, learning_rate, **skips):
        inner = step_module.make_train_step(graphdef, tx, learning_rate, **skips)

        def train_step(state, windows):
            bad = jnp.isin(state.step, jnp.asarray(steps) - 1)
            with monkeypatch.context() as patch:
                patch.setattr(
                    step_module,
                    "loss_and_grads",
                    lambda *args: jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), real(*args)),
                )
                return inner(state, windows)

        return train_step

    monkeypatch.setattr(train_py, "make_train_step", make)


def test_an_update_that_is_not_finite_is_skipped_where_skipping_is_on(config, monkeypatch):
    poisoned(monkeypatch, [3, 4])
    config = dataclasses.replace(config, compilation_cache=None, max_steps=8, sample_every=0)
    with pytest.raises(train_py.NotFiniteError, match="step 3: loss nan"):
        run(config)
    skipping = dataclasses.replace(
        config, name="skip", optimizer=OptimizerConfig(learning_rate=1e-2, skip_loss_z=5.0)
    )
    code, shown = run(skipping)
    assert code == 0 and shown.count("update skipped; loss nan") == 2
    assert all(np.isfinite(x).all() for x in last_state(skipping))
    monkeypatch.setattr(progress, "MOST_NOT_FINITE", 2)
    with pytest.raises(train_py.NotFiniteError, match="step 4: loss nan"):
        run(dataclasses.replace(skipping, name="limit"))


def test_a_last_step_that_is_not_finite_is_an_error(config, monkeypatch):
    # The loss of the last step is of the parameters before its update: it is finite, and what it
    # leaves is not.
    config = dataclasses.replace(
        config, max_steps=5, checkpoint_every=4, val_every=0, sample_every=0
    )
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="constant")
    )
    real = train_py.make_train_step

    def make(*args, **kwargs):
        inner = real(*args, **kwargs)

        def train_step(state, windows):
            state, metrics = inner(state, windows)
            poison = jnp.where(state.step == 5, jnp.inf, 1.0)
            return dataclasses.replace(
                state, params=jax.tree.map(lambda p: p * poison, state.params)
            ), metrics

        return train_step

    monkeypatch.setattr(train_py, "make_train_step", make)
    with pytest.raises(
        train_py.NotFiniteError, match=r"step 5: validation loss nan.*checkpoint of step 4 is kept"
    ):
        run(dataclasses.replace(config, compilation_cache=None))
    assert steps_kept(config) == [4]


def test_a_learning_rate_that_explodes_stops_the_run(config):
    # The loss is finite when the gradient overflows or one step later: either way no later step is
    # saved.
    config = dataclasses.replace(
        config, optimizer=OptimizerConfig(learning_rate=1e30, warmup_steps=0), checkpoint_every=1
    )
    with pytest.raises(train_py.NotFiniteError, match=r"step \d+: .*stopped") as error:
        run(config)
    named = int(re.search(r"step (\d+)", str(error.value))[1])
    assert all(step < named for step in steps_kept(config))


def command_line(config: Config, tmp_path: Path, *more: str) -> list[str]:
    """The same run as a command."""
    file = tmp_path / "config.py"
    shape = {
        f.name: getattr(config.model, f.name)
        for f in dataclasses.fields(config.model)
        if f.name.startswith(("n_", "vocab", "padded", "block"))
    }
    file.write_text(
        "from gptjax import Config, GPT2Config\nfrom pathlib import Path\n"
        f"config = Config(name='run', device='cpu', runs_dir=Path({str(config.runs_dir)!r}), "
        "max_steps=12,\n"
        f"  model=GPT2Config(**{shape}), dataset={config.dataset!r}, sequence_length=32, "
        "batch_tokens=512, micro_batch=8,\n"
        "  val_every=0, sample_every=0, checkpoint_every=4, compilation_cache=None)\n"
    )
    return [sys.executable, str(ROOT / "train.py"), "--config", str(file), *more]


def test_a_full_disk_stops_the_run_and_leaves_the_last_checkpoint(config, tmp_path):
    done = subprocess.run(
        command_line(config, tmp_path, "--max-steps", "4", "--optimizer.schedule-steps", "12"),
        check=False,
    )
    assert done.returncode == 0 and steps_kept(config) == [4]
    command = command_line(config, tmp_path, "--optimizer.schedule-steps", "12")
    # A full disk, as far as a file can tell: none may grow past 32 KiB, where a checkpoint has 400.
    limited = ["bash", "-c", 'trap "" XFSZ; ulimit -f 32; exec "$@"', "-", *command]
    done = subprocess.run(limited, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert "failed: File too large; the newest complete checkpoint is of step 4" in done.stderr
    assert "Traceback" not in done.stderr and steps_kept(config) == [4]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "resuming from step 4" in done.stdout, done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_deterministic_run_on_a_gpu_goes_on_bit_for_bit(config, tmp_path, precision):
    def command(*more):
        options = [
            "--device",
            "gpu",
            "--deterministic",
            "--model.attention",
            "xla",
            "--model.precision",
            precision,
        ]
        # XLA reads the flag once a process, so this test needs processes of its own.
        command = command_line(
            config, tmp_path, *options, "--optimizer.schedule-steps", "12", *more
        )
        subprocess.run(command, check=True, env=os.environ | {"XLA_FLAGS": ""})

    command("--name", "alone")
    command("--max-steps", "6")
    command()
    assert (
        losses(config) == losses(dataclasses.replace(config, name="alone"))
        and steps_kept(config)[-1] == 12
    )


@pytest.mark.gpu
def test_a_second_process_finds_its_programs_on_a_gpu(config, tmp_path):
    """With kernels by hand in them, which a process that lowers nothing must still be able to
    call."""
    model = GPT2Config(
        vocab_size=257, padded_vocab_size=384, block_size=256, n_layer=2, n_head=2, n_embd=128
    )
    config = dataclasses.replace(config, model=model)
    options = [
        "--device",
        "gpu",
        "--model.precision",
        "bf16",
        "--sequence-length",
        "256",
        "--batch-tokens",
        "4096",
    ]
    options += ["--val-every", "2", "--val-tokens", "2048", "--max-steps", "4"]
    options += ["--compilation-cache", str(tmp_path / "cache")]

    def shown_by(name: str) -> str:
        command = command_line(config, tmp_path, *options, "--name", name)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    first, second = shown_by("first"), shown_by("second")
    assert "triton" in first and ("mosaic" in first or _dispatch.capability() != (9, 0))
    assert (
        "(0 of 2 programs found whole, miss" in first
        and "(2 of 2 programs found whole, hit" in second
    ), first + second
    first, second = (losses(dataclasses.replace(config, name=name)) for name in ("first", "second"))
    assert first[1][0] == second[1][0]
    # The backward pass adds in any order.
    assert [loss for loss, *_ in first.values()] == pytest.approx(
        [loss for loss, *_ in second.values()], rel=1e-3
    )


# ----------------------------------------------------------------------------------------- mistakes


def test_errors_are_a_sentence_and_a_non_zero_exit(config, tmp_path):
    done = subprocess.run(
        command_line(config, tmp_path, "--batch-tokens", "1000"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert (
        done.stderr.startswith("error: --batch-tokens 1000 is not a multiple of")
        and "Traceback" not in done.stderr
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "--config FILE is missing" in done.stderr


def test_the_124m_config_needs_a_gpu_and_says_how_to_get_it():
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        str(ROOT / "train.py"),
        "--config",
        str(ROOT / "configs" / "gpt2_124m.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1
    assert "pip install -e '.[cuda13]'" in done.stderr or "cannot start it" in done.stderr
    assert "--device cpu" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        (
            {"dataset": "fineweb10B"},
            DatasetError,
            r"not prepared.*python -m gptjax\.data fineweb10B",
        ),
        (
            {"deterministic": True},
            ConfigError,
            "--deterministic needs --model.attention xla, got auto",
        ),
        ({"resume": "must"}, ConfigError, "--resume must: there is no checkpoint"),
        ({"batch_tokens": 500}, ConfigError, "take 512 or 384"),
        ({"tokenizer": "gpt2"}, DatasetError, "gpt2.*found 'byte'"),
        (
            {"model": GPT2Config(n_layer=1, n_head=1, n_embd=8, block_size=32, attention="cudnn")},
            ConfigError,
            "cudnn.*NVIDIA",
        ),
    ],
)
def test_a_mistake_is_found_before_anything_is_computed(config, changes, error, says):
    with pytest.raises(error, match=says):
        run(dataclasses.replace(config, **changes))


def test_resume_never_and_a_config_that_disagrees(config):
    run(dataclasses.replace(config, max_steps=6))
    with pytest.raises(
        ConfigError,
        match="--resume never: .*already has a checkpoint of step 6; choose another --name",
    ):
        run(dataclasses.replace(config, resume="never"))
    with pytest.raises(
        ConfigError,
        match=r"(?s)begun with another config:.*--seed: the checkpoint has 0, now 5.*--name",
    ):
        run(dataclasses.replace(config, max_steps=6, seed=5))


def test_other_data_under_the_same_name_is_refused(config, tmp_path, corpus):
    run(dataclasses.replace(config, max_steps=6))
    other = tmp_path / "other"
    other.mkdir()
    for split, tokens in (("train_000001", 9000), ("val_000000", 3000)):
        write_shard(other / f"words_{split}.bin", np.arange(tokens, dtype=np.uint16) % 250)
    with pytest.raises(ConfigError, match="was trained on other data"):
        run(dataclasses.replace(config, max_steps=6, dataset=str(other), sample_every=0))


def test_tokens_beyond_the_vocabulary_are_refused_with_their_place(config, tmp_path):
    folder = tmp_path / "wide"
    folder.mkdir()
    tokens = np.zeros(5000, np.uint16)
    write_shard(folder / "wide_val_000000.bin", tokens)
    tokens[1234] = 40_000
    write_shard(folder / "wide_train_000001.bin", tokens)
    with pytest.raises(ShardError, match=rf"wide_train_000001\.bin.*{1024 + 2 * 1234}.*257.*40000"):
        run(dataclasses.replace(config, dataset=str(folder), sample_every=0))


def test_a_damaged_newest_checkpoint_is_named_and_the_run_resumes_from_the_one_before(config):
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
    )
    alone = dataclasses.replace(config, name="alone")
    run(alone)
    run(dataclasses.replace(config, max_steps=12))
    for file in (config.run_dir / "checkpoints" / "12" / "state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(b"")
    with pytest.raises(train_py.CheckpointError, match=r"12 is damaged"):
        run(dataclasses.replace(config, resume="must"))
    code, shown = run(config)
    assert code == 0 and "RESUMING FROM STEP 6" in shown and "12 is damaged" in shown
    assert (config.run_dir / "checkpoints" / "12.damaged").is_dir() and steps_kept(config) == [
        18,
        20,
    ]
    assert losses(config) == losses(alone)
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(config), last_state(alone), strict=True)
    )


@pytest.mark.parametrize("position", [-1, 1.5, 2**70, 17, None, "96"])
def test_a_data_position_that_is_not_the_steps_is_refused(config, monkeypatch, position):
    run(dataclasses.replace(config, max_steps=6, sample_every=0, val_every=0))
    real = train_py.Checkpoints.meta

    def meta(self, step):
        saved = real(self, step)
        saved["data"]["position"] = position
        return saved

    monkeypatch.setattr(train_py.Checkpoints, "meta", meta)
    with pytest.raises(train_py.CheckpointError, match="expected a data position of 6 × 16 = 96"):
        run(dataclasses.replace(config, max_steps=6))


def test_a_second_process_is_refused(config):
    with (
        train_py.locked(config.run_dir),
        pytest.raises(train_py.LockedError, match=f"in use by another process .pid {os.getpid()}"),
    ):
        run(config)


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), BrokenPipeError(32, "Broken pipe")]
)
def test_an_error_of_the_log_or_the_terminal_ends_in_a_sentence_after_a_last_save(
    config, monkeypatch, error
):
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, schedule_steps=20)
    )
    alone = dataclasses.replace(config, name="alone")
    run(alone)
    real = train_py.RunLog.write

    def write(self, kind, step, tokens, **fields):
        if kind == "train" and step == 9:
            raise error
        real(self, kind, step, tokens, **fields)

    with monkeypatch.context() as patch:
        patch.setattr(train_py.RunLog, "write", write)
        with pytest.raises(
            train_py.StoppedError, match=r"stopped at step 10: .*the state of step 10 is saved"
        ):
            run(config)
    assert steps_kept(config)[-1] == 10
    code, _ = run(config)
    assert code == 0
    expected = losses(alone)
    assert losses(config) == {step: expected[step] for step in losses(config)}
    assert all(
        np.array_equal(a, b) for a, b in zip(last_state(config), last_state(alone), strict=True)
    )


def test_a_signal_while_compiling_ends_with_a_sentence(config, tmp_path):
    command = command_line(config, tmp_path, "--compilation-cache", "None")
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("compiling"):
                break
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 128 + signal.SIGINT
    assert (
        said.strip()
        == "stopped by SIGINT; nothing new was saved. The same command starts or resumes the run."
    )


def test_a_closed_pipe_ends_with_its_exit_code_and_no_traceback(config, tmp_path):
    command = command_line(
        config,
        tmp_path,
        "--log-every",
        "1",
        "--max-steps",
        "400",
        "--optimizer.schedule-steps",
        "400",
    )
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step 3/"):
            break
    process.stdout.close()
    said = process.communicate()[1]
    assert process.returncode == 128 + signal.SIGPIPE
    assert "Traceback" not in said and "is saved: the same command resumes from it" in said


def test_what_does_not_fit_is_refused_before_it_is_allocated(config, monkeypatch):
    monkeypatch.setattr(compilation, "available_bytes", lambda device: 500_000)
    monkeypatch.setattr(
        train_py.data,
        "Loader",
        lambda *a, **k: pytest.fail("went on after the step was found too large"),
    )
    with pytest.raises(ConfigError, match=r"--micro-batch 4 needs .*nothing was allocated"):
        run(config)
