"""gptjax.bench: the harness measures the named implementations, reports failures, and refuses what
it cannot measure."""

import itertools
import json
from pathlib import Path

import draw
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gptjax.bench import harness, kernels
from gptjax.bench.__main__ import main
from gptjax.bench.harness import Case, Ceilings

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LIMITS = Ceilings(bytes_per_s=1e9, flops_per_s=1e12)


def make(key):
    return jax.random.normal(key, (64, 64)), jnp.float32(1)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(harness, "SECONDS", 0.001)
    monkeypatch.setattr(harness, "REST_SECONDS", 0.0)
    monkeypatch.setattr(harness, "ROTATED_BYTES", 1e5)
    monkeypatch.setattr(harness, "PROGRAM_SECONDS", 0.0)


def case(**how):
    given = {
        "kernel": "double",
        "name": "64×64",
        "make": make,
        "run": {"xla": lambda x, one: 2 * x + one},
        "bytes": 2 * 64 * 64 * 4,
    }
    return Case(**given | how)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_time_is_positive_and_the_ceiling_follows_from_the_bytes_or_the_operations(in_place):
    (row,) = kernels.measure([case(in_place=in_place)], LIMITS)
    assert row["ms"] > 0
    assert row["GB/s"] == pytest.approx(32768 / row["ms"] / 1e6)
    assert row["ceiling"] == pytest.approx(32768 / 1e9 / (row["ms"] / 1e3))
    assert LIMITS.seconds(case(flops=5e9, bound="bf16")) == pytest.approx(5e-3)


def test_every_call_has_inputs_of_its_own_and_every_output_is_made():
    """A compiler makes one call of two equal ones, and leaves out what nobody reads: here each
    output comes from a callback that it may leave out."""
    made = {"a": [], "b": []}

    def output(name, x):
        def note(x):
            made[name].append(float(x[0, 0]))
            return x

        return jax.pure_callback(note, x, x)

    run = lambda x, one: (output("a", x), output("b", x))
    harness.seconds(case(run={"x": run}), ["x"])
    sets = len(harness.input_sets(run, case()))
    assert sets == 3  # 1e5 bytes / (16 kB in, 32 kB out), rounded up
    assert len(made["a"]) == len(made["b"]) and len(made["a"]) % sets == 0
    assert len(set(made["a"])) == len(set(made["b"])) == sets


def test_an_implementation_is_given_what_it_prepared():
    """Here the residuals of a forward pass: the backward pass alone is timed."""
    forward = []

    def f(x):
        jax.debug.callback(lambda: forward.append(1))
        return jnp.sin(x)

    prepared = case(
        run={"xla": lambda pull, one: pull(jnp.full((64, 64), one))[0]},
        prepare={"xla": lambda x, one: (jax.vjp(f, x)[1], one)},
    )
    (row,) = kernels.measure([prepared], LIMITS)
    assert row["ms"] > 0
    assert len(forward) == 4  # once for each set of inputs, whatever the number of rounds


def test_implementations_alternate():
    ran = []

    def note(name):
        def f(x, one):
            jax.debug.callback(lambda: ran.append(name))
            return x + one

        return f

    run = {name: note(name) for name in "ab"}
    rows = kernels.measure([case(run=run, alternate=True)], LIMITS)
    assert [row["implementation"] for row in rows] == ["a", "b"]
    assert all(row["ms"] > 0 for row in rows)
    changes = sum(left != right for left, right in itertools.pairwise(ran))
    assert changes == 2 * (harness.ROUNDS + 2) - 1  # compilation, estimate, rounds


def test_the_passes_of_a_case_are_equal_in_jax_and_pytorch():
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    arrays = harness.normal(jax.random.key(0), (3, 4), (3, 5), (5, 4), dtype=jnp.float32)
    f = lambda x, w: (x @ w) ** 2
    expected = (
        f(*arrays[1:]),
        *jax.grad(lambda x, w: (arrays[0] * f(x, w)).sum(), (0, 1))(*arrays[1:]),
    )
    (eager, _) = harness.eager_and_compiled(
        lambda torch: harness.passes_in_torch(torch, f)
    ).values()
    theirs = eager(torch)(*map(torch.from_dlpack, arrays))
    for ours, each, y in zip(harness.passes(f)(*arrays), theirs, expected, strict=True):
        np.testing.assert_allclose(ours, y, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(each, y, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(harness.passes(f, both=False)(*arrays), f(*arrays[1:]))


def test_every_benchmark_can_be_read_and_has_what_its_table_needs():
    """Bytes for what is bound by memory, operations for what is bound by matmuls; names that
    differ."""
    files = sorted((BENCHMARKS / "kernels").glob("*.py"))
    assert {"lm_head", "row_softmax"} <= {file.stem for file in files}
    for name in files:
        found = kernels.load(name)
        assert len({(c.kernel, c.name) for c in found}) == len(found)
        for c in found:
            assert (c.bytes if c.bound == "memory" else c.flops) > 0, (name, c.name)
            assert c.bound in ("memory", "bf16") and c.run


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """Run `bench kernels` on cases, as if there were a GPU; return exit code and errors."""

    def run(cases, *options):
        (tmp_path / "double.py").touch()
        monkeypatch.setattr(kernels, "load", lambda file: cases)
        monkeypatch.setattr(kernels, "ceilings", lambda: LIMITS)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        code = main(["kernels", str(tmp_path / "double.py"), *options])
        return code, capsys.readouterr().err

    return run


def test_a_failure_is_reported_after_the_other_rows_are_written(bench, tmp_path):
    def broken(x, one):
        raise ValueError("no such shape")

    cases = [case(run={"broken": broken, "xla": lambda x, one: x + one})]
    code, said = bench(cases, "--out", str(tmp_path))
    assert code == 1 and "did not run:\ndouble · 64×64 · broken: ValueError: no such shape" in said
    assert json.loads((tmp_path / "double.json").read_text())["rows"][1]["ms"] > 0


def test_one_case_of_a_kernel(bench):
    cases = [case(name=name) for name in ("64×64 bf16", "64×64 fp32 as TF32")]
    code, said = bench(cases, "--case", "TF32")
    assert code == 0 and "fp32 as TF32" in said and "bf16" not in said
    code, said = bench(cases, "--case", "fp8")
    assert code == 1 and "has 'fp8' in its name" in said


def test_errors(tmp_path, capsys):
    (tmp_path / "other.py").write_text("cases = 1")
    (tmp_path / "text.txt").touch()
    for name in ("nonsense.py", "other.py", "text.txt"):
        assert main(["kernels", str(tmp_path / name)]) == 1
        assert "function cases()" in capsys.readouterr().err
    if jax.default_backend() != "gpu":
        assert main(["kernels", str(BENCHMARKS / "kernels" / "lm_head.py")]) == 1
        assert "JAX sees none here" in capsys.readouterr().err


DRAWN = ["kernels/norm.json", "ladder.json", "profile/bf16_64.json"]


@pytest.mark.parametrize("file", DRAWN)
def test_a_result_is_drawn(file, tmp_path):
    assert draw.main([str(BENCHMARKS / "results" / file), str(tmp_path)]) == 0
    (picture,) = tmp_path.glob("*.png")
    assert picture.stat().st_size > 5000
