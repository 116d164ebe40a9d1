"""gptjax.plan: estimates compared with measured steps, the table of rates, and the command."""

import dataclasses
import functools
import json
from pathlib import Path

import jaxtyping
import pytest

from gptjax import cli, plan
from gptjax.bench.configs import one_micro_batch
from gptjax.config import Config
from gptjax.models.registry import PRESETS, config_class
from gptjax.precision import Precision
from gptjax.training.memory import GIB

STEP = Path(__file__).parents[1] / "benchmarks/results/step"
MEASURED = (
    "fp32_8 tf32_4 tf32_32 recompute_64 fp8_64_torch llama3_1b_16_torch devices_bf16_64 "
    "fp8_speedrun_stage_5"
).split()


def rows(file: str) -> list[dict]:
    result = json.loads((STEP / file).with_suffix(".json").read_text())
    assert result["device"] == "NVIDIA H200"
    return [row for row in result["rows"] if row["system"] == "gptjax"]


@pytest.fixture
def unchecked():
    """A third of a trace is jaxtyping's checks, which other tests run."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@functools.cache  # several files measure the same step
def peak(model, batch, sequence_length, optimizer, precision, recompute, devices, *, how) -> float:
    stage = model.startswith("speedrun")
    base = Config(model=PRESETS["gpt2" if stage else model])
    if stage:
        base = cli.load(Path("configs/speedrun_pr233.py")).of_stage(5)
    config = one_micro_batch(
        base, batch, sequence_length, optimizer=optimizer, precision=Precision(precision),
        recompute=recompute,
    )  # fmt: skip
    config = dataclasses.replace(config, batch_tokens=devices * config.batch_tokens, **dict(how))
    return plan.memory(config, plan.GPUS["h200"], devices)[1] / GIB


@pytest.mark.usefixtures("unchecked", "optax_promotion")
@pytest.mark.parametrize("file", MEASURED)
def test_memory_is_within_five_percent_of_the_measurement(file):
    """Larger GPT-2 models, measured too, differ in the number of blocks only."""
    for number, row in enumerate(rows(file)):
        keys = "model batch sequence_length algorithm precision recompute".split()
        count = row.get("devices") or 1
        how = [(key, row[key]) for key in ("parallel", "reduce_dtype")] if count > 1 else ()
        # The allocator's peak is that of all rows of a process so far.
        expected = row["needed_gib"] if number else row["peak_gib"]
        found = peak(*(row[key] for key in keys), count, how=tuple(how))
        assert found == pytest.approx(expected, rel=0.05), row


def test_rates_are_those_of_the_results():
    for rate in plan.RATES:
        found = [
            row["mfu"]
            for row in rows(rate.file)
            if (row["model"], row["precision"]) == (rate.preset, rate.precision)
            and (row.get("devices") or 1) == rate.devices
        ]
        model = PRESETS[rate.preset]
        assert found and rate.mfu == pytest.approx(found[0], abs=5e-4), rate
        assert type(model) is config_class(rate.model)
        assert rate.params == pytest.approx(model.num_params, rel=0.01)


@pytest.fixture
def tiny(tmp_path):
    file = tmp_path / "tiny.py"
    file.write_text(
        "from gptjax import Config, GPT2Config, Precision\n"
        "model = GPT2Config(n_layer=1, n_embd=128, n_head=2, precision=Precision('bf16'))\n"
        "config = Config(model=model, batch_tokens=8 * 1024, micro_batch=2, max_steps=10)\n"
    )
    return file


@pytest.mark.usefixtures("unchecked")
def test_command(tiny, capsys, monkeypatch):
    assert plan.main(tiny, gpu="h100", count=2, price=3.0, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    (stage,) = result["stages"]
    assert stage["largest_micro_batch"] == 4  # the whole batch of a GPU: no accumulation
    assert stage["state_gib"] < stage["peak_gib"] < 1
    assert result["hours"] == pytest.approx(10 * 8 * 1024 / stage["tokens_per_s"] / 3600)
    assert result["cost_usd"] == pytest.approx(6 * result["hours"])
    monkeypatch.setattr(plan, "plan", lambda *_: result | {"cost_usd": None})
    assert plan.main(tiny) == 0
    out = capsys.readouterr().out
    assert "fits" in out and "MFU" in out and "USD" not in out


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("gpu", plan.GPUS)
def test_every_gpu(tiny, gpu, capsys):
    """The default back end of attention is cuDNN, except on Hopper."""
    assert plan.main(tiny, gpu=gpu) == 0
    assert f"1 × {gpu}" in capsys.readouterr().out


def test_errors(tiny, capsys):
    assert plan.main(tiny, price=-1.0) == 1
    assert "--price 0 or more" in capsys.readouterr().err
    assert plan.main(tiny, count=0) == 1
    assert "--count 1 or more" in capsys.readouterr().err
    assert plan.main(tiny, count=3) == 1
    assert "--batch-tokens" in capsys.readouterr().err
