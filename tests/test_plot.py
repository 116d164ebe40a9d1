"""The picture of the losses: what is drawn, what is said, and mistakes told in one line."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from gptjax.plot import plot_runs, short_number, smooth

PNG = b"\x89PNG\r\n\x1a\n"


def make_run(folder, *, steps=400, val_every=50, shift=0.0, nan_at=(), tokens_per_step=500_000):
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    with (folder / "log.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            clean = 3.3 + shift + 7.6 * math.exp(-step / (0.03 * steps))
            loss = None if step in nan_at else clean + 0.05 * rng.normal()
            rows = [{"kind": "train", "step": step, "tokens": step * tokens_per_step, "loss": loss}]
            if val_every and step % val_every == 0:
                rows.append({"kind": "val", "step": step, "tokens": step * tokens_per_step, "loss": clean})
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


@pytest.fixture
def figures(monkeypatch):
    """The figures that are saved while a test runs."""
    saved, savefig = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, out, **kw: (saved.append(self), savefig(self, out, **kw))[1])
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
    settled = slice(100, None)
    assert np.std(np.diff(smoothed.get_ydata()[settled])) < np.std(np.diff(raw.get_ydata()[settled])) / 5
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "training tokens" and axes.get_ylabel() == "loss (nats per token)"
    assert "100M" in [tick.get_text() for tick in axes.get_xticklabels()]
    # The settled course fills the picture: the first steps at a loss of 10 do not squeeze it.
    low, high = axes.get_ylim()
    assert 3.0 < low < 3.3 and 4.0 < high < 6.0


def test_three_runs_have_three_colours_and_names(tmp_path, figures):
    runs = [make_run(tmp_path / name, shift=shift) for name, shift in (("a", 0), ("b", 0.2), ("$c$", -0.1))]
    plot_runs([runs[0], str(runs[1]), runs[2] / "log.jsonl"], tmp_path / "loss.png", x="steps")
    lines, legend = drawn(figures[0])
    assert legend[:3] == ["a · val 3.3000", "b · val 3.5000", "$c$ · val 3.2000"]
    assert not any(text.get_parse_math() for text in figures[0].axes[0].get_legend().get_texts())  # $c$ is a name
    colours = [line.get_color() for line in lines]
    assert len(lines) == 9 and len(set(colours)) == 3 and colours[0] == colours[1] == colours[2]
    np.testing.assert_array_equal(lines[0].get_xdata(), np.arange(1, 401))
    assert figures[0].axes[0].get_xlabel() == "training steps"


def test_runs_of_one_name_are_told_apart(tmp_path, figures):
    runs = [make_run(tmp_path / parent / "run") for parent in ("one", "two")]
    plot_runs(runs, tmp_path / "loss.png")
    assert [text.split(" · ")[0] for text in drawn(figures[0])[1][:2]] == [str(run) for run in runs]


def test_a_nan_is_a_gap_and_a_run_without_validation_says_so(tmp_path, figures):
    run = make_run(tmp_path / "run", val_every=0, nan_at={7, 400})
    plot_runs([run], tmp_path / "loss.png")
    (raw, smoothed, _), legend = drawn(figures[0])
    assert np.isnan(raw.get_ydata()[[6, 399]]).all() and np.isfinite(smoothed.get_ydata()).all()
    assert legend[0].startswith("run · train 3.3") and legend[0].endswith(", no val")
    assert legend[1:] == ["training, smoothed"]


@pytest.mark.parametrize("steps", [1, 2, 20])
def test_a_short_run_is_shown_whole(tmp_path, figures, steps):
    plot_runs([make_run(tmp_path / "run", steps=steps, val_every=10)], tmp_path / "loss.png")
    (raw, *_), _ = drawn(figures[0])
    low, high = figures[0].axes[0].get_ylim()
    assert low < raw.get_ydata()[0] < high


@pytest.mark.parametrize("suffix", ["pdf", "svg"])
def test_the_ending_names_the_format(tmp_path, suffix):
    out = plot_runs([make_run(tmp_path / "run")], tmp_path / f"loss.{suffix}")
    assert {"pdf": b"%PDF", "svg": b"<svg"}[suffix] in out.read_bytes()


def test_smoothing_is_a_centred_mean():
    ramp = np.arange(9.0)
    np.testing.assert_allclose(smooth(ramp, 2)[:7], ramp[:7])  # a centred mean leaves a straight line alone
    np.testing.assert_allclose(smooth(ramp, 2)[7:], [np.mean([5, 6, 7, 8]), np.mean([6, 7, 8])])
    np.testing.assert_allclose(smooth(np.array([1.0, np.nan, 3.0, 5.0]), 1), [1, 2, 4, 4])
    assert np.isnan(smooth(np.full(3, np.nan), 1)).all()


@pytest.mark.parametrize(
    "value, text",
    [(0, "0"), (950, "950"), (10_000, "10k"), (2_500_000, "2.5M"), (1e9, "1B"), (9.75e9, "9.75B"), (1e13, "10T")],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda at: at / "none", FileNotFoundError, "no run at .*none: expected a run folder or a log.jsonl"),
        (lambda at: at, FileNotFoundError, "no log.jsonl in .*: is it a run folder?"),
        (lambda at: make_run(at / "run", steps=0), ValueError, "no training loss in it yet"),
        (lambda at: make_run(at / "run", steps=2, nan_at={1, 2}), ValueError, "no training loss in it yet"),
    ],
)
def test_a_run_without_curves_is_an_error(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        plot_runs([make(tmp_path)], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_no_runs_and_no_folder_are_errors(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_runs([], tmp_path / "loss.png")
    with pytest.raises(FileNotFoundError, match="no folder .*missing to write loss.png into; make it first"):
        plot_runs([make_run(tmp_path / "run")], tmp_path / "missing" / "loss.png")


def command(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", "gptjax.plot", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=environment(),
    )


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


def test_the_command_draws_into_loss_png(tmp_path):
    run = make_run(tmp_path / "run")
    done = command(run, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "loss.png\n", "")
    assert (tmp_path / "loss.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    "mistake, said",
    [
        (["none"], "no run at none"),
        ([], "nothing to plot"),
        (["run", "--out", "loss.xyz"], "xyz"),
        (["broken"], "broken/log.jsonl, line 1: expected a JSON object"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(tmp_path, mistake, said):
    make_run(tmp_path / "run", steps=5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "log.jsonl").write_text("{\n{\n")
    done = command(*mistake, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr


def test_help_names_every_option_and_default():
    done = command("--help")
    assert done.returncode == 0
    for word in ("RUN [RUN ...]", "--out PATH", "loss.png", "--x {tokens,steps}", "(default: tokens)"):
        assert word in done.stdout


def test_plotting_loads_neither_jax_nor_pyplot():
    code = (
        "import sys, gptjax.plot; print([m for m in ('jax', 'flax', 'torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
    assert done.stdout == "[]\n", done.stderr
