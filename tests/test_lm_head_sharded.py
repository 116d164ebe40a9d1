"""linear_cross_entropy on arrays that are sharded under `jax.jit`: each device computes the logits
of its rows and columns, and the gradients are summed once."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from kernel_tools import collectives
from process_tools import python

from pallas_kernels import fused_classifier, linear_cross_entropy, lm_head
from pallas_kernels.classifier import SigmoidCap

N, C, V = 64, 8, 48
ROWS, WHOLE = PartitionSpec("devices"), PartitionSpec()
SPECS = ROWS, WHOLE, ROWS, ROWS, ROWS
OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.02, "softcap": 5.0, "vocab_size": 45}
kinds = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


def mesh_of(kind):
    return jax.make_mesh((2,), ("devices",), axis_types=(kind,), devices=jax.devices()[:2])


def drawn():
    """Return x, w, targets, weights of rows, and cotangents."""
    rng = np.random.default_rng(0)
    arrays = rng.standard_normal((N, C)), rng.standard_normal((V, C)), rng.integers(45, size=N)
    arrays = *arrays, rng.uniform(0, 2, N), rng.standard_normal(N)
    return [np.asarray(a, np.float32 if a.dtype == np.float64 else np.int32) for a in arrays]


def objective(f, loss, x, w, targets, weights, g):
    losses, lse = f(x, w, targets, weights_N=weights, return_lse=True, **OPTIONS)
    if loss == "weighted":
        return (losses * g).sum()
    return losses.mean() + (lse * g).sum() if loss == "lse" else losses.mean()


def gradients(f, loss):
    return jax.value_and_grad(functools.partial(objective, f, loss), (0, 1))


def compiled(kind, loss, mesh=None, specs=SPECS, **how):
    f = functools.partial(linear_cross_entropy, **{"precision": "highest"} | how)
    mesh = mesh or mesh_of(kind)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        arrays = [
            jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
            for a, sharding in zip(drawn(), shardings, strict=True)
        ]
        out = NamedSharding(mesh, WHOLE), tuple(shardings[:2])
        run = jax.jit(gradients(f, loss), out_shardings=out).lower(*arrays).compile()
    return run, [jax.device_put(a, s) for a, s in zip(drawn(), shardings, strict=True)]


GRID = PartitionSpec("devices", "vocabulary")
COLUMNS = ROWS, PartitionSpec("vocabulary"), ROWS, ROWS, ROWS


def mesh_of_columns(kind):
    """Two shards of the vocabulary; with four devices two of the rows, too."""
    shape = jax.device_count() // 2, 2
    return jax.make_mesh(shape, ("devices", "vocabulary"), axis_types=(kind,) * 2)


@kinds
@pytest.mark.parametrize("loss", ["mean", "weighted", "lse"])
@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("sharded", ["rows", "vocabulary"])
def test_values_and_collectives(sharded, chunk, loss, kind):
    """Rows are never moved. Single numbers that are reduced: the loss, and whether the cotangents
    differ.

    Of sharded rows, the gradient of w is summed; if the cotangents may differ, it is also in the
    branch that computes it again, as is the gradient of lse.

    Of a sharded vocabulary, each chunk of rows is reduced twice: its maxima, and its sums of exp,
    targets and logits. The gradient of x is summed, and that of w stays sharded. The branch that
    computes the latter again and the gradient of lse reduce maxima and sums of exp.
    """
    how = {"implementation": "fused", "chunk": chunk}
    if sharded == "vocabulary":
        how |= {"mesh": mesh_of_columns(kind), "specs": COLUMNS}
    run, arrays = compiled(kind, loss, **how)
    found = run(*arrays)
    right = jax.jit(gradients(lm_head.reference, loss))(*drawn())
    for ours, expected in zip(*map(jax.tree.leaves, (found, right)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-6)
    for gradient, array in zip(found[1], arrays, strict=False):
        assert gradient.sharding.is_equivalent_to(array.sharding, 2)
    expected = [V * C] * (3 if loss == "lse" else 2)
    if sharded == "vocabulary":
        parts, passes = jax.device_count() // 2, 1 + (loss == "lse")
        rows = N // parts
        k = chunk or rows
        expected = [k] * (rows // k) * (4 + 2 * passes) + [rows * C] * passes
        expected += [V // 2 * C] * (1 + passes) * (parts > 1)
    assert [size for size in collectives(run.as_text()) if size != 1] == sorted(expected)


@kinds
def test_each_device_launches_on_its_rows(kind, triton_on_cpu):
    """`auto` selects the kernel."""
    run, _ = compiled(kind, "mean")
    launches = " ".join(re.findall(r" = (.*?) custom-call\(.*?xla_ffi_python", run.as_text()))
    assert f"[{N // 2},{V}]" in launches and f"[{N},{V}]" not in launches


def test_a_mean_executes_no_second_matmul():
    """The branch that computes the gradient again stays in the executable, because it has a
    collective; its condition is a constant."""
    text = compiled(AxisType.Auto, "mean", implementation="fused")[0].as_text()
    (condition,) = re.findall(r" conditional\(%?(\S+?),", text)
    assert re.search(rf"%?{re.escape(condition)} = \S+ constant\(", text)


def test_numpy_arrays_with_in_shardings():
    """Their types name no mesh."""
    mesh = mesh_of(AxisType.Auto)
    shardings = tuple(NamedSharding(mesh, spec) for spec in SPECS)
    f = functools.partial(linear_cross_entropy, implementation="fused", chunk=16)
    run = jax.jit(gradients(f, "mean"), in_shardings=shardings).lower(*drawn()).compile()
    assert [size for size in collectives(run.as_text()) if size not in (1, V * C)] == []


@pytest.mark.parametrize("loss", ["weighted", "lse"])
def test_vmap_and_shard_map_of_chunks(loss):
    """With several devices: a sharding rule has no `jax.vmap`."""
    f = functools.partial(
        linear_cross_entropy, precision="highest", implementation="fused", chunk=16
    )
    x, w, targets, weights, g = map(jnp.asarray, drawn())
    half = lambda a: a.reshape(2, N // 2, *a.shape[1:])
    right = jax.vmap(gradients(lm_head.reference, loss), (0, None, 0, 0, 0))
    expected = right(half(x), w, half(targets), half(weights), half(g))
    found = jax.vmap(gradients(f, loss), (0, None, 0, 0, 0))(
        half(x), w, half(targets), half(weights), half(g)
    )

    def on_device(x, w, *rows):
        value, (dx, dw) = gradients(f, loss)(x, w, *rows)
        return value[None], (dx[None], dw[None])

    local = jax.shard_map(
        on_device, mesh=mesh_of(AxisType.Auto), in_specs=SPECS, out_specs=ROWS, check_vma=False
    )
    for result in (found, jax.jit(local)(x, w, targets, weights, g)):
        for ours, theirs in zip(*map(jax.tree.leaves, (result, expected)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=2e-6)


# ------------------------------------------------------------------------------ vocabulary-parallel


def test_vocabulary_sums_are_one_collective():
    how = {"implementation": "fused", "specs": COLUMNS}
    text = compiled(AxisType.Auto, "mean", mesh_of_columns(AxisType.Auto), **how)[0].as_text()
    found = sorted(result.count("f32") for result in re.findall(r" = (.*?) all-reduce\(", text))
    assert found[-1] == 3 and len([result for result in found if result == 3]) == 1


def test_vocabulary_and_rows_on_four_devices():
    """In a process of its own."""
    tests = [__file__, "-k", "values_and_collectives and vocabulary"]
    python("-m", "pytest", "-q", "-n", "0", *tests, TEST_DEVICES="4")


@kinds
@pytest.mark.parametrize("f", [linear_cross_entropy, fused_classifier])
def test_vocabulary_options(f, kind, request):
    """Several targets, ignored and invalid ones, and a shard without real columns: as on one device
    in plain JAX."""
    if f == fused_classifier:
        request.getfixturevalue("triton_on_cpu")
    x, w, targets, weights, g = drawn()
    logits = x @ w.T
    logits[:, 20:] = np.nan
    targets = np.stack([targets % 20, targets % 7], 1)
    targets[3], targets[5, 1], targets[7, 0] = -1, -1, 30
    options = {"vocab_size": 20, "softcap": SigmoidCap(), "target_weights": (1.0, 0.5)}
    options |= {"ignore_index": -1, "label_smoothing": 0.1, "z_loss": 0.02, "return_lse": True}
    arrays, specs = ((x, w), COLUMNS[:2]) if f == linear_cross_entropy else ((logits,), [GRID])

    def call(implementation, arrays, targets, weights, g):
        how = {"weights_N": weights, "implementation": implementation, **options}
        out, pull = jax.vjp(lambda *arrays: f(*arrays, targets, **how)[:: 3 - len(specs)], *arrays)
        return out, pull((g, g))

    right = jax.jit(functools.partial(call, "xla"))(arrays, targets, weights, g)
    mesh = mesh_of_columns(kind)
    with jax.set_mesh(mesh):
        place = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
        arrays = tuple(map(place, arrays, specs))
        arrays = arrays, *(place(x, ROWS) for x in (targets, weights, g))
        back_end = "fused" if f == linear_cross_entropy else "triton"
        run = jax.jit(functools.partial(call, back_end)).lower(*arrays).compile()
    for ours, expected in zip(*map(jax.tree.leaves, (run(*arrays), right)), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=2e-6)
    assert not [size for size in collectives(run.as_text()) if size < 0]


@kinds
def test_vocabulary_in_fp8(kind, triton_on_cpu):
    """No array is gathered."""
    how = {"numerics": "fp8", "precision": None, "specs": COLUMNS}
    text = compiled(kind, "mean", mesh_of_columns(kind), **how)[0].as_text()
    sizes = collectives(text)
    assert sizes and not [size for size in sizes if size < 0]


def test_vocabulary_on_a_mesh_with_manual_and_other_axes():
    mesh = jax.make_mesh((1, 2), ("manual", "vocabulary"), axis_types=(AxisType.Auto,) * 2)
    f = functools.partial(linear_cross_entropy, implementation="fused")
    specs = {"in_specs": WHOLE, "out_specs": WHOLE, "axis_names": {"manual"}, "check_vma": False}
    with jax.set_mesh(mesh):
        x, w, targets, *_ = drawn()
        w = jax.device_put(w, NamedSharding(mesh, COLUMNS[1]))
        lowered = jax.jit(jax.shard_map(f, **specs)).lower(x, w, targets)
        with pytest.raises(jax.errors.JaxRuntimeError, match="sums over shards are not supported"):
            lowered.compile()
