"""gptjax.plan: estimates compared with measured steps, the table of rates, and the command."""

import dataclasses
import json
from pathlib import Path

import pytest

from gptjax import plan
from gptjax.bench.configs import one_micro_batch
from gptjax.config import Config
from gptjax.models.registry import PRESETS, config_class
from gptjax.precision import Precision
from gptjax.training.memory import GIB

STEP = Path(__file__).parents[1] / "benchmarks/results/step"
MEASURED = (
    "fp32_8 bf16_4 bf16_64_alone recompute_64 fp8_64_torch gpt2_medium_96 "
    "gpt2_xl_36 fp8_gpt2_xl_36 llama3_124m_64_torch llama3_1b_16_torch devices_bf16_64 "
    "devices_bf16_64_normuon devices_gpt2_xl_32_fsdp devices_gpt2_xl_32_zero1_torch"
).split()


def rows(file: str) -> list[dict]:
    result = json.loads((STEP / file).with_suffix(".json").read_text())
    assert result["device"] == "NVIDIA H200"
    return [row for row in result["rows"] if row["system"] == "gptjax"]


@pytest.mark.parametrize("file", MEASURED)
def test_memory_is_within_five_percent_of_the_measurement(file):
    """Not TF32 (16 % too low) and the speedrun's fifth stage (7 % too low)."""
    for number, row in enumerate(rows(file)):
        config = one_micro_batch(
            Config(model=PRESETS[row["model"]]), row["batch"], row["sequence_length"],
            optimizer=row["algorithm"], precision=Precision(row["precision"]),
            recompute=row["recompute"],
        )  # fmt: skip
        count = row.get("devices") or 1
        if count > 1:
            how = {"parallel": row["parallel"], "reduce_dtype": row["reduce_dtype"]}
            config = dataclasses.replace(config, batch_tokens=count * config.batch_tokens, **how)
        _, peak = plan.memory(config, plan.GPUS["h200"], count)
        # The allocator's peak is that of all rows of a process so far.
        expected = row["needed_gib"] if number else row["peak_gib"]
        assert peak / GIB == pytest.approx(expected, rel=0.05), row


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
        "config = Config(model=model, batch_tokens=32 * 1024, micro_batch=4, max_steps=10)\n"
    )
    return file


def test_command(tiny, capsys):
    assert plan.main(tiny, gpu="H100", count=2, price=3.0, json=True) == 0
    result = json.loads(capsys.readouterr().out)
    (stage,) = result["stages"]
    assert stage["largest_micro_batch"] == 16  # the whole batch of a GPU: no accumulation
    assert stage["state_gib"] < stage["peak_gib"] < 2
    assert result["hours"] == pytest.approx(10 * 32 * 1024 / stage["tokens_per_s"] / 3600)
    assert result["cost_usd"] == pytest.approx(6 * result["hours"])


def test_errors_and_text(tiny, capsys):
    assert plan.main(tiny, gpu="h101") == 1
    assert ", ".join(plan.GPUS) in capsys.readouterr().err
    assert plan.main(tiny, count=3) == 1
    assert "--batch-tokens" in capsys.readouterr().err
    assert plan.main(tiny) == 0
    out = capsys.readouterr().out
    assert "fits" in out and "MFU" in out and "USD" not in out
