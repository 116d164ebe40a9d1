"""benchmarks/experiments/fp8_losses.py: the runs of each part, the numbers of the report, and the
results that the configs state."""

import importlib
import json
from pathlib import Path

import pytest

from gptjax.config import ConfigError

ROOT = Path(__file__).parents[1]


@pytest.fixture
def losses(monkeypatch):
    # As when it is run: the modules that it imports are in the same folder.
    monkeypatch.syspath_prepend(ROOT / "benchmarks" / "experiments")
    return importlib.import_module("fp8_losses")


def record(group, precision, seed, final, losses, **changed):
    """A record of a run with a validation at step 0 and at the end."""
    return {
        "name": f"{group}_{precision}_{seed}",
        "group": group,
        "optimizer": "adamw",
        "precision": precision,
        "seed": seed,
        "command": "python train.py",
        "steps": len(losses),
        "tokens": 128 * len(losses),
        "loss": losses,
        "grad_norm": [1.0] * len(losses),
        "val": [[0, 9.0], [len(losses), final]],
        "not_finite": False,
        "ms": 1.0,
        "tokens_per_second": 1000,
        "training_seconds": 2.0,
        "command_seconds": 3.0,
        "spike_step": None,
        "kernels": {},
        "date": "2026-01-02",
        "device": "NVIDIA H200",
        "versions": {"jax": "0.11.2"},
        "commit": None,
    } | changed


def test_the_parts_have_all_runs_and_pairs_stay_together(losses):
    names = [run.name for unit in losses.plan() for run in unit]
    parts = losses.share(losses.plan(), 2)
    assert sorted(names) == sorted(run.name for part in parts for run in part)
    assert len({*names}) == len(names) == 38
    for part in parts:
        seeds = {
            p: {r.seed for r in part if r.group == "adamw" and r.precision == p}
            for p in ("bf16", "fp8")
        }
        assert seeds["bf16"] == seeds["fp8"]
        assert [run.group for run in part[:2]] == ["adamw", "adamw"]
    for wrong in ("2/2", "1", "a/b"):
        with pytest.raises(ConfigError, match="expected I/N with I below N"):
            losses.part_of(losses.Options(out=Path("x"), part=wrong))


def test_patterns_choose_runs(losses):
    chosen = losses.chosen(("twice_fp8_*", "adamw_bf16_1", "normuon_*_[01]"))
    names = [[run.name for run in unit] for unit in chosen]
    assert names == [
        ["adamw_bf16_1"],
        ["normuon_bf16_0", "normuon_fp8_0"],
        ["normuon_bf16_1", "normuon_fp8_1"],
        ["twice_fp8_0"],
    ]
    with pytest.raises(ConfigError, match="--runs adam: expected names or patterns of adamw_"):
        losses.chosen(("adam",))


def test_the_config_of_every_run_exists(losses):
    options = losses.Options(out=Path("x"), train_options="--device cpu")
    for unit in losses.plan():
        for run in unit:
            command = run.command(options)
            assert (ROOT / command[command.index("--config") + 1]).exists()
            assert command[-2:] == ["--device", "cpu"] and f"--seed {run.seed}" in " ".join(command)


def test_the_numbers_of_the_report(losses):
    report = importlib.import_module("_fp8_losses_report")
    flat = [5.0] * 10
    records = [
        record("adamw", "bf16", 0, 3.0, [4.0] * 10),
        record("adamw", "bf16", 1, 3.2, [6.0] * 10),
        record("adamw", "fp8", 0, 3.001, [*[4.1] * 8, 9.0, 9.0]),
        record("adamw", "fp8", 1, 3.203, [*[6.1] * 8, 9.0, 9.0]),
        record("adamw", "fp8", 1, 3.205, [*[6.1] * 8, 9.0, 9.0]),  # repeated: the newest counts
        record("short", "bf16", 0, 3.1, flat),
        record("short", "bf16", 1, 3.1, flat),
        record("control", "bf16", 1, 3.3, flat),
        record("start", "fp8", 0, 3.104, flat),
        record("finish", "fp8", 0, 3.002, flat),
        record("moments", "fp8", 0, 3.011, flat),
        record("twice", "bf16", 0, 3.0, flat),
        record("twice", "fp8", 0, None, flat, not_finite=True),
    ]
    found = report.summary(records)
    fp8 = found["adamw"]["fp8"]
    assert fp8["finals"] == [3.001, 3.205] and fp8["difference"] == pytest.approx(0.003)
    assert fp8["standard_error"] == pytest.approx(0.002)
    assert fp8["steps_within_spread"] == 0.8
    # Eight steps 0.1 above bf16, and two 5 and 3 above.
    assert fp8["training_difference"] == pytest.approx(0.08 + 0.8)
    assert found["control"]["bf16"]["difference"] == pytest.approx(0.2)
    assert found["start"]["fp8"]["difference"] == pytest.approx(0.004)
    assert found["finish"]["fp8"]["difference"] == pytest.approx(0.002)
    assert found["moments"]["fp8"]["difference"] == pytest.approx(0.01)  # from adamw's fp8
    assert found["twice"]["fp8"]["final"] is None and found["twice"]["fp8"]["difference"] is None


def test_the_recovery_from_a_spike(losses):
    report = importlib.import_module("_fp8_losses_report")
    falling = [5 - 0.01 * i for i in range(100)]
    falling[51:61] = [8.0] * 10
    found = report.recovery(record("spike", "fp8", 0, 3.0, falling, spike_step=50))
    assert found["greatest"] == 8.0 and found["before"] == pytest.approx(5 - 0.01 * 39.5)
    assert 20 <= found["recovered_after"] <= 31
    short = report.recovery(record("spike", "fp8", 0, 3.0, falling[:40], spike_step=50))
    assert short["greatest"] is None and short["recovered_after"] is None


def test_the_report_writes_the_result_the_picture_and_the_config(losses, tmp_path, capsys):
    report = importlib.import_module("_fp8_losses_report")
    config = tmp_path / "config.py"
    config.write_text('"""A.\n\nTime:      not run\nLoss:      not run\n\nB.\n"""\n')
    records = [record("adamw", p, s, 3.0 + s, [5.0] * 40) for p in ("bf16", "fp8") for s in (0, 1)]
    paths = tmp_path / "result.json", tmp_path / "picture.png"
    with pytest.raises(ConfigError, match="found none"):
        report.report([], None, *paths, {})
    assert report.report(records, "abcdef01", *paths, {"adamw": config}) == 0
    result = json.loads(paths[0].read_text())
    assert result["commit"] == "abcdef01" and result["result"] == report.summary(records)
    assert "grad_norm" not in result["rows"][0] and paths[1].stat().st_size > 5000
    text = " ".join(config.read_text().split())
    assert "Loss: 3.5000 at step 40, the mean of 2 seeds (3.0000, 4.0000)" in text
    assert "2026-01-02, commit abcdef0 B." in text and text.endswith('"""')
    shared = [records[0] | dict.fromkeys(losses.TIMES), records[1]]
    assert report.of_runs(shared)["tokens_per_second"] == 1000
    assert report.of_runs(shared[:1])["command_seconds"] is None
    report.state_result(config, shared[:1], None)
    text = " ".join(config.read_text().split())
    assert "not measured: other processes shared the NVIDIA H200" in text
    assert "3.0000 at step 40, seed 0; 2026-01-02" in text
    records[0]["commit"] = "1234567890"
    report.report(records, "abcdef01", *paths, {"adamw": config})
    assert json.loads(paths[0].read_text())["commit"] == "1234567890, abcdef01"
    assert "commits 1234567, abcdef0" in " ".join(config.read_text().split())
    for path in report.CONFIGS.values():
        copy = tmp_path / path.name
        copy.write_text(path.read_text())
        report.state_result(copy, records[:2], None)
        assert copy.read_text().count('"""') == path.read_text().count('"""')
    assert "adamw fp8: " in capsys.readouterr().out


def test_a_log_becomes_a_record(losses, tmp_path):
    log = tmp_path / "log.jsonl"
    assert losses.read_log(log) is None
    config = {"batch_tokens": 100, "model.spike_step": 1, "stages": []}
    lines = [
        {
            "kind": "event",
            "event": "start",
            "config": config,
            "kernels": {},
            "device": "cpu",
            "versions": {},
            "step": 0,
        },
        {"kind": "val", "step": 0, "loss": 9.0},
        {"kind": "train", "step": 1, "tokens": 100, "loss": 5.0, "grad_norm": 1.0, "ms": None},
        {"kind": "train", "step": 2, "tokens": 200, "loss": None, "grad_norm": 2.0, "ms": 50.0},
        {"kind": "event", "event": "not finite", "step": 2},
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    found = losses.read_log(log)
    assert found["tokens_per_second"] == 2000 and found["training_seconds"] == 0.1
    assert found["loss"] == [5.0, None] and found["not_finite"] and found["spike_step"] == 1
    assert importlib.import_module("_fp8_losses_report").final(found) is None
