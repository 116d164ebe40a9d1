"""The plot of losses: curves, labels, and errors in one line."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from gptjax import plot
from gptjax.plot import plot_runs, short_number, smooth

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
    settled = slice(100, None)
    assert (
        np.std(np.diff(smoothed.get_ydata()[settled]))
        < np.std(np.diff(raw.get_ydata()[settled])) / 5
    )
    (axes,) = figures[0].axes
    assert axes.get_xlabel() == "training tokens"
    assert axes.get_ylabel() == "loss (nats per token, log scale)"
    assert "100M" in [tick.get_text() for tick in axes.get_xticklabels()]
    assert axes.get_title() == "baseline"


def test_every_step_is_inside_the_picture(tmp_path, figures):
    """Also the first steps, whose loss is far above the others."""
    plot_runs([make_run(tmp_path / "run", steps=1000)], tmp_path / "loss.png")
    axes = figures[0].axes[0]
    (raw, *_), _ = drawn(figures[0])
    (low, high), (left, right) = axes.get_ylim(), axes.get_xlim()
    assert low < raw.get_ydata().min() and raw.get_ydata().max() < high
    assert left <= raw.get_xdata()[0] and raw.get_xdata()[-1] < right
    # The last tenth of the decrease has a tenth of the height, and the axis has several labels.
    y = axes.transData.transform([(1, 3.3), (1, 4.0), (1, 10.9)])[:, 1]
    assert (y[1] - y[0]) > 0.1 * (y[2] - y[0])
    assert len([tick for tick in axes.get_yticks() if low <= tick <= high]) >= 5


def test_losses_that_are_zero_get_a_linear_axis(tmp_path, figures):
    run = tmp_path / "run"
    run.mkdir()
    rows = [{"kind": "train", "step": n, "tokens": n, "loss": float(n % 2)} for n in range(1, 9)]
    (run / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot_runs([run], tmp_path / "loss.png")
    assert figures[0].axes[0].get_yscale() == "linear"
    assert figures[0].axes[0].get_ylabel() == "loss (nats per token)"


def test_three_runs_have_three_colours_and_names(tmp_path, figures):
    runs = [
        make_run(tmp_path / name, shift=shift)
        for name, shift in (("a", 0), ("b", 0.2), ("$c$", -0.1))
    ]
    plot_runs([runs[0], str(runs[1]), runs[2] / "log.jsonl"], tmp_path / "loss.png", x="steps")
    lines, legend = drawn(figures[0])
    assert legend[:3] == ["a · val 3.3000", "b · val 3.5000", "$c$ · val 3.2000"]
    (axes,) = figures[0].axes
    assert axes.get_title() == "a, b, $c$"
    # $c$ is a name
    assert not any(text.get_parse_math() for text in [axes.title, *axes.get_legend().get_texts()])
    colours = [line.get_color() for line in lines]
    assert len(lines) == 9 and len(set(colours)) == 3 and colours[0] == colours[1] == colours[2]
    np.testing.assert_array_equal(lines[0].get_xdata(), np.arange(1, 401))
    assert figures[0].axes[0].get_xlabel() == "training steps"


# ---------------------------------------------------------------------------------- time and groups


def test_the_time_is_that_of_the_steps(tmp_path, figures):
    run = make_run(tmp_path / "run", steps=6, val_every=3, ms=lambda step: 6000 * step)
    plot_runs([run], tmp_path / "loss.png", x="time")
    (raw, _, val), _ = drawn(figures[0])
    # The first step counts as the second.
    np.testing.assert_allclose(raw.get_xdata(), np.cumsum([0.2, 0.2, 0.3, 0.4, 0.5, 0.6]))
    np.testing.assert_allclose(val.get_xdata(), [0.7, 2.2])
    assert figures[0].axes[0].get_xlabel() == "training time (minutes)"
    with pytest.raises(
        ValueError, match=r"log\.jsonl: no step has a time in ms; choose --x tokens"
    ):
        plot_runs([make_run(tmp_path / "old", steps=3)], tmp_path / "old.png", x="time")


def test_a_group_is_drawn_as_mean_and_deviation(tmp_path, figures):
    """Runs that differ in the seed of their name; of other lengths, they end with the shortest."""
    runs = [
        make_run(tmp_path / name, shift=shift, steps=steps, val_every=40)
        for name, shift, steps in (
            ("lr1-seed0", 0.0, 200),
            ("lr2-seed0", 1.0, 200),
            ("lr1-seed1", 0.3, 200),
            ("lr1_seed12", 0.6, 200),
            ("seedless", 2.0, 200),
        )
    ]
    plot_runs(runs, tmp_path / "loss.png", x="steps", group=True)
    axes, (lines, legend) = figures[0].axes[0], drawn(figures[0])
    assert [text.split(" · ")[0] for text in legend[:3]] == [
        "lr1 (3 seeds)",
        "lr2-seed0",
        "seedless",
    ]
    assert legend[0].endswith("val 3.6000 ± 0.3000") and legend[1].endswith("val 4.3000")
    assert legend[3] == "training, smoothed: mean of the seeds ± standard deviation"
    mean, val = lines[:2]
    own = smooth(np.array(plot._read(runs[0] / "log.jsonl", "", "steps").train_loss), 4)
    np.testing.assert_allclose(mean.get_ydata(), own + 0.3, atol=1e-12)
    np.testing.assert_array_equal(val.get_xdata(), [40, 80, 120, 160, 200])
    (band,) = [c for c in axes.collections if hasattr(c, "get_paths") and len(c.get_paths()) == 1]
    points = band.get_paths()[0].vertices
    at_end = points[points[:, 0] == 200, 1]
    np.testing.assert_allclose(
        [at_end.min(), at_end.max()], mean.get_ydata()[-1] + np.array([-0.3, 0.3])
    )


def test_seeds_of_different_lengths_end_with_the_shortest(tmp_path, figures):
    runs = [make_run(tmp_path / f"a-seed{n}", steps=100 + 50 * n, val_every=0) for n in (1, 0)]
    plot_runs(runs, tmp_path / "loss.png", x="steps", group=True)
    (mean, *_), legend = drawn(figures[0])
    assert mean.get_xdata().tolist() == list(range(1, 101)) and legend[0].endswith(", no val")
    ends = [tmp_path / "b-seed0", tmp_path / "b-seed1"]
    for folder, step in zip(ends, (1, 2), strict=True):
        folder.mkdir()
        (folder / "log.jsonl").write_text(TRAIN.replace('"step": 1', f'"step": {step}'))
    with pytest.raises(ValueError, match=r"seeds of b \(2 seeds\) have no steps in common"):
        plot_runs(ends, tmp_path / "none.png", x="steps", group=True)


def test_runs_of_the_same_name_have_distinct_labels(tmp_path, figures):
    runs = [make_run(tmp_path / parent / "run") for parent in ("one", "two")]
    plot_runs(runs, tmp_path / "loss.png")
    names = [text.split(" · ")[0] for text in drawn(figures[0])[1][:2]]
    for name, run in zip(names, runs, strict=True):
        assert name[-30:] == str(run)[-30:]
    assert names[0] != names[1]


def test_copied_logs_of_one_name_and_folder_stay_apart(tmp_path, figures):
    logs = []
    for name in ("one/a", "two/a", "one/b"):
        log = make_run(tmp_path / "runs" / name, steps=5) / "log.jsonl"
        copy = tmp_path / f"{name}.jsonl"
        copy.parent.mkdir(exist_ok=True)
        logs.append(log.rename(copy))
    plot_runs(logs, tmp_path / "loss.png", group=True)
    names = [text.split(" · ")[0] for text in drawn(figures[0])[1][:3]]
    assert [name[-6:] for name in names] == ["/one/a", "/two/a", "/one/b"]


def test_runs_named_by_their_seed_only(tmp_path, figures):
    runs = [make_run(tmp_path / name, steps=5) for name in ("seed0", "seed1")]
    plot_runs(runs, tmp_path / "loss.png", group=True)
    assert drawn(figures[0])[1][0].startswith("(2 seeds) · ")


def test_a_run_of_any_name(tmp_path, figures):
    names = ["x[b]y", "x[b", "a\x1b[31mred", "W" * 200]
    plot_runs([make_run(tmp_path / name, steps=5) for name in names], tmp_path / "loss.png")
    axes = figures[0].axes[0]
    assert axes.get_title().startswith("x[b]y, x[b, a\ufffd[31mred, WWW")
    assert len(axes.get_title()) <= 91
    assert drawn(figures[0])[1][0].startswith("x[b]y · ")


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


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (950, "950"),
        (10_000, "10k"),
        (2_500_000, "2.5M"),
        (1e9, "1B"),
        (9.75e9, "9.75B"),
        (1e13, "10T"),
    ],
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize(
    "make, error, message",
    [
        (
            lambda at: at / "none",
            FileNotFoundError,
            "no run at .*none: expected a run folder or a log.jsonl",
        ),
        (lambda at: at, FileNotFoundError, "no log.jsonl in .*: is it a run folder?"),
        (lambda at: make_run(at / "run", steps=0), ValueError, "no training loss in it yet"),
        (
            lambda at: make_run(at / "run", steps=2, nan_at={1, 2}),
            ValueError,
            "no training loss in it yet",
        ),
    ],
)
def test_a_run_without_curves_is_an_error(tmp_path, make, error, message):
    with pytest.raises(error, match=message):
        plot_runs([make(tmp_path)], tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_no_runs_and_no_folder_are_errors(tmp_path):
    with pytest.raises(ValueError, match="nothing to plot"):
        plot_runs([], tmp_path / "loss.png")
    with pytest.raises(
        FileNotFoundError,
        match="no folder .*missing to write loss.png into; create the folder first",
    ):
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
        (["run", "--out", "loss.xyz"], "loss.xyz: expected a picture's name that ends in one of"),
        (["run", "--out", "curve"], "curve: expected a picture's name that ends in one of"),
        (["broken"], "broken/log.jsonl, line 1: expected a JSON object"),
        (["a\x1b[31mred"], "no run at a\ufffd[31mred"),
    ],
)
def test_a_mistake_is_one_line_and_a_status(tmp_path, mistake, said):
    make_run(tmp_path / "run", steps=5)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "log.jsonl").write_text("{\n{\n")
    done = command(*mistake, cwd=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and said in done.stderr


TRAIN = '{"kind": "train", "step": 1, "tokens": 2, "loss": 3.0}\n'


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "no training loss in it yet"),
        (TRAIN.replace("3.0", "null"), "no training loss in it yet"),
        (TRAIN.replace("3.0", "NaN"), "no training loss in it yet"),
        (TRAIN + TRAIN.replace("3.0", '"x"'), "line 2: expected numbers .* loss, found 2 and 'x'"),
        (TRAIN.replace("3.0", "[1]"), "line 1: expected numbers"),
        (TRAIN.replace("3.0", "true"), "line 1: expected numbers"),
        (TRAIN.replace("2,", "1" + 400 * "0" + ","), "line 1: expected numbers"),
        (TRAIN.replace("2,", "null,"), "line 1: expected numbers"),
        (TRAIN.replace("3.0", 10_000 * "[" + 10_000 * "]") + TRAIN, "line 1"),
    ],
)
def test_a_log_with_other_contents_is_refused(tmp_path, capsys, text, said):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=said) as refused:
        plot.main((tmp_path / "run",), tmp_path / "loss.png")
    assert "\n" not in refused.value.code  # a text: exit code 1
    assert not (tmp_path / "loss.png").exists()


def test_nan_and_infinity_in_a_log_are_gaps(tmp_path, figures):
    (tmp_path / "run").mkdir()
    text = "".join(
        TRAIN.replace("3.0", loss) for loss in ("3.0", "Infinity", "NaN", "1e400", "3.0")
    )
    (tmp_path / "run" / "log.jsonl").write_text(text)
    plot_runs([tmp_path / "run"], tmp_path / "loss.png")
    (raw, *_), _ = drawn(figures[0])
    assert np.isnan(raw.get_ydata()).tolist() == [False, True, True, True, False]


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_a_log_that_is_no_file_is_refused(tmp_path, make):
    run = tmp_path / "run"
    run.mkdir()
    make(run / "log.jsonl")
    with pytest.raises(
        ValueError, match=r"run/log\.jsonl: expected a file, found a folder, a pipe"
    ):
        plot_runs([run], tmp_path / "loss.png")


def test_a_reader_that_ends_early_ends_the_command_quietly():
    """As in `python -m gptjax.plot --help | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    code = [sys.executable, "-m", "gptjax.plot", "--help"]
    done = subprocess.run(
        code, stdout=writing, stderr=subprocess.PIPE, env=environment(), check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_help_names_every_option_and_default():
    done = command("--help")
    assert done.returncode == 0
    for word in (
        "RUN [RUN ...]",
        "--out PATH",
        "loss.png",
        "--x {tokens,steps,time}",
        "--group",
        "(default: tokens)",
    ):
        assert word in done.stdout


def test_plotting_loads_neither_jax_nor_pyplot():
    code = (
        "import sys, gptjax.plot; "
        "print([m for m in ('jax', 'flax', 'torch', 'matplotlib.pyplot') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment()
    )
    assert done.stdout == "[]\n", done.stderr
