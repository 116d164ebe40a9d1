"""benchmarks/tools/learning.py trains the runs of a plan, resumes, and computes its table."""

import json
import math
import sys
from pathlib import Path

import draw
import learning
import pytest

from gptjax import cli

ROOT = Path(__file__).parents[1]
PLAN = """
config = "configs/a.py"
[options]
best = "--momentum 0.9"
[[runs]]
name = "base"
seeds = [0, 1]
purpose = "the noise"
[[runs]]
name = "rival_short"
options = "--max-steps 50"
seeds = [0, 1]
purpose = "steps to the base's loss"
[[runs]]
name = "rival_long"
base = "rival_short"
options = "$best --max-steps 80"
seeds = [0, 1]
purpose = "steps to the base's loss"
[[runs]]
name = "diverges"
config = "configs/b.py"
options = "--nan"
seeds = [0]
purpose = "the largest learning rate"
[[compare]]
base = "base"
rival = ["rival_short", "rival_long"]
"""
# In place of train.py: a log whose final loss is 10 − log(steps) − seed/100, or an error.
FAKE = """
import json, math, os, pathlib, sys, time
words = dict(zip(sys.argv, sys.argv[1:]))
name, here = words["--name"], pathlib.Path(words["--runs-dir"])
with open(here / "started", "a") as file:
    print(name, os.environ["CUDA_VISIBLE_DEVICES"], file=file)
if (here / f"fail_{name}").exists():
    sys.exit("out of memory")
time.sleep(60 * (here / f"sleep_{name}").exists())
steps, seed = int(words.get("--max-steps", 100)), int(words["--seed"])
loss = 10 - math.log(steps) - seed / 100
start = {"kind": "event", "event": "start", "commit": None, "date": "2026-11-27"}
start |= {"device": "H100", "versions": {}, "config": {"max_steps": steps, "batch_tokens": 1000}}
train = {"kind": "train", "loss": 1.0}
rows = [start, *(train | {"step": k, "ms": 100 if k else None} for k in range(steps))]
rows[-50:] = [row | {"loss": loss + 1} for row in rows[-50:]]
shares = {"mlp.0.hidden": 0, "mlp.1.hidden": 0.1, "mlp.0.hidden.zero": 0.2}
rows.append({"kind": "clipping"} | shares)
rows.append({"kind": "val", "step": steps, "loss": loss})
if "--nan" in sys.argv:
    rows[-1] = {"kind": "event", "event": "not finite"}
(here / name).mkdir()
text = "".join(json.dumps({"step": 0, "tokens": 0} | row) + "\\n" for row in rows)
(here / name / "log.jsonl").write_text(text)
sys.exit("--nan" in sys.argv)
"""


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call the command with the plan and the program above; return its exit code and the runs."""
    (tmp_path / "plan.toml").write_text(PLAN)
    (tmp_path / "fake.py").write_text(FAKE)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr(learning, "TRAIN", [sys.executable, "-S", str(tmp_path / "fake.py")])
    monkeypatch.setattr(learning.machine, "gpus", lambda: [4, 7, 9])

    def run(*more):
        (started := tmp_path / "runs" / "started").write_text("")
        where = ["--plan", "plan.toml", "--out", "out.jsonl", "--runs-dir", "runs"]
        paths = [str(tmp_path / w) if i % 2 else w for i, w in enumerate(where)]
        code = learning.main([*paths, *more])
        return code, dict(line.split() for line in started.read_text().splitlines())

    return run


def test_runs_are_trained_once_and_what_is_missing_is_trained_again(call, tmp_path, capsys):
    fail = tmp_path / "runs" / "fail_rival_short-seed1"
    fail.touch()
    code, started = call("--gpus", "2")
    assert code == 1 and len(started) == 7 and {*started.values()} == {"4", "7"}
    shown = capsys.readouterr().out
    assert "rival_short-seed1: not finished" in shown and "out of memory" in shown
    assert "missing: rival_short-seed1; the same command continues" in shown
    fail.unlink()
    code, started = call("--gpus", "1", "--commit", "abc")
    assert code == 0 and started == {"rival_short-seed1": "4"}
    records = learning.read_records(tmp_path / "out.jsonl")
    first = min(records, key=lambda r: r["name"])
    assert len(records) == 7 and all(r["seconds"] >= 0 for r in records)
    assert first["val"] == [[100, pytest.approx(10 - math.log(100))]]
    assert first["command"] == "python train.py --config configs/a.py --seed 0"
    assert [r["commit"] for r in records] == [None] * 6 + ["abc"]
    assert (first["ms"], first["tokens_per_second"], first["training_seconds"]) == (100, 1e4, 10)
    assert [r["group"] for r in records if not r["finite"]] == ["diverges"]
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()}
    # 95 % of Student's t with one degree of freedom: 12.706 standard errors.
    assert rows["base"][:4] == ["2", "100", "5.3898", f"{12.706 * 0.005:.4f}"]
    assert rows["rival_short"][4:6] == ["+0.6931", "0.0000"] and rows["diverges"][2] == "inf"
    # Compared with rival_short, the final and the training loss.
    assert rows["rival_long"][4:6] == rows["rival_long"][8:10] == ["-0.4700", "0.0000"]
    assert rows["base"][6:8] == ["6.3898", "6.3848–6.3948"] and rows["base"][10:12] == [
        "100.0",
        "0.0",
    ]
    assert rows["base"][13:] == "FP8 mlp.hidden ≤ 1.0e-01, FP8 mlp.hidden.zero ≤ 2.0e-01".split()
    long = next(run for run in records if run["group"] == "rival_long")
    assert "configs/a.py --momentum 0.9 --max-steps 80" in long["command"]
    assert long["fp8"] == {"mlp.hidden": 0.1, "mlp.hidden.zero": 0.2}
    assert (
        rows["steps"] == "of rival_short to the loss of base: 1.000 ± 0.000 (95 %, 2 seeds)".split()
    )
    assert [r["command"].split()[3] for r in records if not r["finite"]] == ["configs/b.py"]
    # Another command under the same name is another run.
    (tmp_path / "plan.toml").write_text(PLAN.replace("--max-steps 50", "--max-steps 60"))
    assert call()[1].keys() == {"rival_short-seed0", "rival_short-seed1"}
    assert call("--gpus", "0") == (0, {})


def test_a_run_that_the_limit_stops_is_not_recorded(call, tmp_path, monkeypatch, capsys):
    (tmp_path / "runs" / "sleep_base-seed0").touch()
    monkeypatch.setattr(learning, "STARTED", learning.time.perf_counter())
    code, started = call("--limit-s", "0.3")
    assert code == 1 and started.keys() == {"base-seed0"}
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "runs/base-seed0").exists()
    # A run that takes longer than the time that is left does not start.
    (tmp_path / "out.jsonl").write_text(
        json.dumps({"name": "x", "command": "", "seconds": 99}) + "\n"
    )
    monkeypatch.setattr(learning, "report", lambda *_: None)
    assert call("--limit-s", "50") == (1, {})


def test_the_losses_of_groups_of_three_seeds_are_drawn(tmp_path):
    record = {"group": "a", "finite": True, "steps": 9, "training_seconds": 2.0, "device": "H100"}
    records = [record | {"seed": s, "val": [[0, 9.0], [9, 3.0 + s]]} for s in range(3)]
    records += [record | {"group": "one", "seed": 0, "val": [[0, 9.0], [5, 3.0]]}]
    (tmp_path / "runs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert draw.main([str(tmp_path / "runs.jsonl"), str(tmp_path)]) == 0
    assert (tmp_path / "runs.png").stat().st_size > 5000
    with pytest.raises(ValueError, match="no group of runs has finite losses of three seeds"):
        draw.draw_runs(records[1:], tmp_path / "runs.png")


def test_a_plan_is_checked(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.replace('purpose = "the noise"', ""))
    with pytest.raises(ValueError, match="the run 'base' has no purpose"):
        learning.read_plan(plan)
    plan.write_text(PLAN.replace("rival_long", "base"))
    with pytest.raises(ValueError, match="two runs have the same name and seed"):
        learning.read_plan(plan)


@pytest.mark.parametrize("name", ["learning_plan", "learning_final_plan", "fp8_losses_plan"])
def test_a_kept_plan_has_options_of_train(name):
    runs, comparisons = learning.read_plan(ROOT / "benchmarks" / f"{name}.toml")
    groups = {run.group: run for run in runs}
    assert {run.base for run in runs} <= groups.keys()
    for run in groups.values():
        cli.from_command_line([*run.command[2:], "--name", run.name])
    for compare in comparisons:
        assert {compare["base"], *compare["rival"]} <= groups.keys()
