"""The plot of losses: curves, labels, and errors in one line."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from gptjax.plot import plot_runs, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(
    folder, *, steps=400, val_every=50, shift=0.0, nan_at=(), tokens_per_step=500_000, ms=None
):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with (folder / "log.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            clean = 3.3 + shift + 7.6 * math.exp(-step / (0.03 * steps))
            loss = None if step in nan_at else clean + 0.05 * rng.normal()
            rows = [{"kind": "train", "step": step, "tokens": step * tokens_per_step, "loss": loss}]
            if ms is not None:
                # The first step of a process has no time.
                rows[0]["ms"] = None if step == 1 else ms(step)
            if val_every and step % val_every == 0:
                rows.append(
                    {"kind": "val", "step": step, "tokens": step * tokens_per_step, "loss": clean}
                )
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved while a test runs."""
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, out, **kw: (saved.append(self), savefig(self, out, **kw))[1]
    )
    return saved


def drawn(figure):
    """Lines on the axes, and texts in the legend."""
    (axes,) = figure.axes
    return axes.get_lines(), [text.get_text() for text in axes.get_legend().get_texts()]


def test_one_run_shows_raw_smoothed_and_validation(tmp_path, figures):
    run = make_run(tmp_path / "baseline")
    out = plot_runs([run], tmp_path / "loss.png")
    assert out == tmp_path / "loss.png" and out.read_bytes().startswith(PNG)
    (raw, smoothed, val), legend = drawn(figures[0])
    assert legend == ["baseline · val 3.3000", "training, smoothed", "validation"]
    np.testing.assert_array_equal(raw.get_xdata(), 500_000 * np.arange(1, 401))
    np.testing.assert_array_equal(val.get_xdata(), 500_000 * np.arange(50, 401, 50))
    assert raw.get_alpha() < 1 and raw.get_linewidth() < smoothed.get_linewidth()
    assert val.get_marker() == "o" and val.get_linestyle() == "None"
    rough, fine = (np.std(np.diff(curve.get_ydata()[100:])) for curve in (raw, smoothed))
    assert fine < rough / 5
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "training tokens" and axes.get_ylabel() == "loss (nats per token)"
    assert "100M" in [tick.get_text() for tick in axes.get_xticklabels()]
    # Every step is inside the figure, the first ones with a loss far above the others included.
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    assert low < raw.get_ydata().min() and raw.get_ydata().max() < high
    assert left <= raw.get_xdata()[0] and raw.get_xdata()[-1] < right
    # The last tenth of the decrease has a tenth of the height, and the axis has several labels.
    y = axes.transData.transform([(1, 3.3), (1, 4.0), (1, 10.9)])[:, 1]
    assert axes.get_yscale() == "log" and (y[1] - y[0]) > 0.1 * (y[2] - y[0])
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 5


def test_three_runs_have_three_colors_and_names(tmp_path, figures):
    names = (("a", 0), ("b", 0.2), ("$c$", -0.1))
    runs = [make_run(tmp_path / name, shift=shift) for name, shift in names]
    plot_runs([runs[0], str(runs[1]), runs[2] / "log.jsonl"], tmp_path / "loss.png", x="steps")
    lines, legend = drawn(figures[0])
    assert legend[:3] == ["a · val 3.3000", "b · val 3.5000", "$c$ · val 3.2000"]
    (axes,) = figures[0].axes
    assert not any(text.get_parse_math() for text in axes.get_legend().get_texts())
    colors = [line.get_color() for line in lines]
    assert len(lines) == 9 and len(set(colors)) == 3 and colors[0] == colors[1] == colors[2]
    np.testing.assert_array_equal(lines[0].get_xdata(), np.arange(1, 401))
    assert axes.get_xlabel() == "training steps"


def test_time_is_the_sum_of_the_step_times(tmp_path, figures):
    run = make_run(tmp_path / "run", steps=6, val_every=3, ms=lambda step: 6000 * step)
    plot_runs([run], tmp_path / "loss.png", x="time")
    (raw, _, val), _ = drawn(figures[0])
    # The first step counts as the second.
    np.testing.assert_allclose(raw.get_xdata(), np.cumsum([0.2, 0.2, 0.3, 0.4, 0.5, 0.6]))
    np.testing.assert_allclose(val.get_xdata(), [0.7, 2.2])
    untimed = make_run(tmp_path / "old", steps=3, ms=lambda step: None)
    with pytest.raises(ValueError, match=r"log\.jsonl: no step has a time in ms; choose --x tok"):
        plot_runs([untimed], tmp_path / "old.png", x="time")


def test_a_group_is_drawn_as_mean_and_deviation(tmp_path, figures):
    """Runs that differ in the seed of their name."""
    shifts = {"lr1-seed0": 0.0, "lr2-seed0": 1.0, "lr1-seed1": 0.3, "lr1_seed12": 0.6, "less": 2.0}
    runs = [
        make_run(tmp_path / name, shift=shift, steps=200, val_every=40)
        for name, shift in shifts.items()
    ]
    plot_runs(runs, tmp_path / "loss.png", x="steps", group=True)
    axes, (lines, legend) = figures[0].axes[0], drawn(figures[0])
    assert legend[0] == "lr1 (3 seeds) · val 3.6000 ± 0.3000"
    assert legend[1:3] == ["lr2 · val 4.3000", "less · val 5.3000"]
    assert legend[3] == "training, smoothed: mean of the seeds ± standard deviation"
    mean, val = lines[:2]
    losses = [json.loads(line) for line in (runs[0] / "log.jsonl").read_text().splitlines()]
    own = smooth(np.array([row["loss"] for row in losses if row["kind"] == "train"]), 4)
    np.testing.assert_allclose(mean.get_ydata(), own + 0.3, atol=1e-12)
    np.testing.assert_array_equal(val.get_xdata(), [40, 80, 120, 160, 200])
    band = next(c for c in axes.collections if len(c.get_paths()) == 1)
    points = band.get_paths()[0].vertices
    at_end = points[points[:, 0] == 200, 1]
    ends = mean.get_ydata()[-1] + np.array([-0.3, 0.3])
    np.testing.assert_allclose([at_end.min(), at_end.max()], ends)


def test_seeds_of_different_lengths_end_with_the_shortest(tmp_path, figures):
    runs = [make_run(tmp_path / f"a-seed{n}", steps=100 + 50 * n, val_every=0) for n in (1, 0)]
    plot_runs(runs, tmp_path / "loss.png", x="steps", group=True)
    (mean, *_), legend = drawn(figures[0])
    assert mean.get_xdata().tolist() == list(range(1, 101)) and legend[0].endswith(", no val")
    ends = [tmp_path / "b-seed0", tmp_path / "b-seed1"]
    for folder, step in zip(ends, (1, 2), strict=True):
        folder.mkdir()
        (folder / "log.jsonl").write_text(TRAIN.replace('"step": 1', f'"step": {step}'))
    with pytest.raises(ValueError, match="seeds of a group have no steps in common"):
        plot_runs(ends, tmp_path / "none.png", x="steps", group=True)


def test_runs_of_one_name_are_named_by_their_paths(tmp_path, figures):
    runs = [make_run(tmp_path / name, steps=5) for name in ("one/a", "two/a")]
    plot_runs([runs[0], runs[1] / "log.jsonl"], tmp_path / "loss.png")
    names = [text.split(" · ")[0] for text in drawn(figures[0])[1][:2]]
    assert names == [str(run) for run in runs]


def test_a_nan_is_a_gap_and_a_run_without_validation_says_so(tmp_path, figures):
    run = make_run(tmp_path / "run", val_every=0, nan_at={7, 400})
    text = (run / "log.jsonl").read_text().splitlines()
    for at, value in ((20, "Infinity"), (30, "NaN"), (40, "1e400")):
        text[at] = TRAIN.strip().replace("3.0", value)
    (run / "log.jsonl").write_text("\n".join(text))
    plot_runs([run], tmp_path / "loss.png")
    (raw, smoothed, _), legend = drawn(figures[0])
    assert np.isnan(raw.get_ydata()[[6, 20, 30, 40, 399]]).all()
    assert np.isfinite(smoothed.get_ydata()).all()
    assert legend[0].startswith("run · train 3.3") and legend[0].endswith(", no val")


def test_a_run_of_one_step_is_shown(tmp_path, figures):
    out = plot_runs([make_run(tmp_path / "run", steps=1)], tmp_path / "loss.svg")
    (raw, *_), _ = drawn(figures[0])
    low, high = figures[0].axes[0].get_ylim()
    assert low < raw.get_ydata()[0] < high and b"<svg" in out.read_bytes()


def test_all_curves_of_a_plot_are_smoothed_alike(tmp_path, figures):
    """A long run, its first tenth, and the same losses with half the points."""
    long = make_run(tmp_path / "long", val_every=0)
    rows = (long / "log.jsonl").read_text().splitlines()
    for name, kept in (("short", rows[:40]), ("sparse", rows[1::2])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.jsonl").write_text("\n".join(kept) + "\n")
    plot_runs([long, tmp_path / "short", tmp_path / "sparse"], tmp_path / "loss.png")
    whole, first, sparse = (line.get_ydata() for line in drawn(figures[0])[0][1::3])
    np.testing.assert_array_equal(first[:21], whole[:21])  # their windows are in both runs
    losses = np.array([json.loads(row)["loss"] for row in rows])
    np.testing.assert_allclose(whole, smooth(losses, 8))
    np.testing.assert_allclose(sparse, smooth(losses[1::2], 4))


def test_smoothing_is_a_centred_mean():
    ramp = np.arange(9.0)
    # a centred mean does not change a straight line
    np.testing.assert_allclose(smooth(ramp, 2)[:7], ramp[:7])
    np.testing.assert_allclose(smooth(ramp, 2)[7:], [np.mean([5, 6, 7, 8]), np.mean([6, 7, 8])])
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0, 5.0]), 1), [1, 2, 4, 4])
    assert np.isnan(smooth(np.full(3, np.nan), 1)).all()


TRAIN = '{"kind": "train", "step": 1, "tokens": 2, "loss": 3.0}\n'


@pytest.mark.parametrize(
    "text, said",
    [
        (None, "no run at .*: expected a run folder or a log.jsonl"),
        ("", "no training loss in it yet"),
        (TRAIN + TRAIN.replace("3.0", '"x"'), "expected numbers as tokens and loss: .*'x'"),
        (TRAIN.replace("2,", "1" + 400 * "0" + ","), "expected numbers"),
        (TRAIN.replace("3.0", 10_000 * "[" + 10_000 * "]") + TRAIN, "line 1"),
        (os.mkfifo, "no run at .*: expected a run folder or a log.jsonl"),
    ],
)
def test_a_run_without_curves_is_refused(tmp_path, text, said):
    (tmp_path / "run").mkdir()
    if callable(text):
        text(tmp_path / "run" / "log.jsonl")
    elif text is not None:
        (tmp_path / "run" / "log.jsonl").write_text(text)
    with pytest.raises((ValueError, FileNotFoundError), match=said):
        plot_runs([tmp_path / "run"], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_the_command(tmp_path):
    """It loads neither JAX nor pyplot."""
    run, out = make_run(tmp_path / "run", steps=5), tmp_path / "loss.png"
    code = f"""if True:
        import runpy, sys
        sys.argv = ["plot", {str(run)!r}, "--out", {str(out)!r}]
        try:
            runpy.run_module("gptjax.plot", run_name="__main__")
        except SystemExit as end:
            unwanted = {{"jax", "flax", "torch", "matplotlib.pyplot"}}
            print(end.code, unwanted & sys.modules.keys())
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    how = {"capture_output": True, "text": True, "env": environment}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], check=False, **how)
    assert (done.stdout, done.stderr) == (f"{out}\n0 set()\n", "")
    assert out.read_bytes().startswith(PNG)
    with pytest.raises(ValueError, match="'xyz' is not supported"):
        plot_runs([run], tmp_path / "loss.xyz")
