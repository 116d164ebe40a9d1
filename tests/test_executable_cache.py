"""The cache of executables: a hit needs no tracing, and a change of any input is a miss."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from gptjax.config import ConfigError
from gptjax.training import executable_cache
from gptjax.training.compilation import Compiler
from gptjax.training.executable_cache import ExecutableCache
from gptjax.training.memory import needed_bytes

HERE = Path(__file__).resolve()
traced = []


def double(x):
    traced.append("double")
    return 2 * x


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A source file beside this one, in place of all others."""
    file = tmp_path / "source.py"
    file.write_text("x = 1")
    monkeypatch.setattr(executable_cache, "source_files", lambda: {HERE, file})
    monkeypatch.setattr(executable_cache, "_process_began", lambda: np.inf)
    compilation_cache.reset_cache()  # of other tests' folder
    yield file
    # JAX's own settings again.
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


@pytest.fixture
def cache(tmp_path, source):
    return tmp_path / "cache"


def kept(cache) -> list[Path]:
    return sorted((cache / "executables").glob("*")) if (cache / "executables").exists() else []


def test_found_without_running_its_python(cache):
    traced.clear()
    x = jnp.arange(5.0)
    cold, warm = Compiler(cache, "made from this"), Compiler(cache, "made from this")
    first = cold(jax.jit(double), x)
    assert (
        traced == ["double"]
        and cold.executables[0]["source"] == "compiled"
        and (cold.hits, cold.misses) == (0, 1)
    )
    jax.clear_caches()
    second = warm(jax.jit(double), x)
    assert traced == ["double"]
    assert second(x).tolist() == first(x).tolist() == [0, 2, 4, 6, 8]
    (executable,) = warm.executables
    assert executable["source"] == "executable cache"
    assert executable["lower"] == 0 and executable["compile"] > 0
    assert (warm.hits, warm.misses) == (
        1,
        0,
    ) and "(1 of 1 from the executable cache, hit, cache" in str(warm)
    assert cold.notes == warm.notes == [] and len(kept(cache)) == 1
    # JAX's own cache has no second copy.
    assert not list(cache.glob("**/jit_double*"))


def key(folder, function=double, arguments=None, options=None, inputs=1, own=None):
    arguments = (jnp.arange(3.0),) if arguments is None else arguments
    return ExecutableCache(folder, inputs).key(jax.jit(function), arguments, options or {}, own)


def on(device: int, order: tuple[int, ...] = ()) -> jax.ShapeDtypeStruct:
    """Something on one CPU device, or split over several."""
    devices = np.array([jax.devices("cpu")[i] for i in order or (device,)])
    return jax.ShapeDtypeStruct(
        (2,), jnp.float32, sharding=NamedSharding(Mesh(devices, ("d",)), PartitionSpec("d"))
    )


def test_what_changes_a_program_changes_its_key(tmp_path, source, monkeypatch):
    keys = {"base": key(tmp_path)}
    assert key(tmp_path) == key(tmp_path / "another folder") == keys["base"]
    keys["made from"] = key(tmp_path, inputs={"learning_rate": 2})
    keys["options"] = key(tmp_path, options={"xla_gpu_enable_triton_gemm": False})
    keys["what only this function closes over"] = key(tmp_path, own="a model")

    def double(x):
        return 2 * x

    keys["a function of this name"] = key(tmp_path, function=double)
    for name, argument in {
        "shape": jnp.arange(4.0),
        "dtype": jnp.arange(3),
        "tree": [jnp.arange(3.0)],
        "device 0": on(0),
        "device 1": on(1),
        "devices": on(0, (0, 1)),
        "their order": on(0, (1, 0)),
    }.items():
        keys[name] = key(tmp_path, arguments=(argument,))
    with jax.default_matmul_precision("highest"):
        keys["in a with statement"] = key(tmp_path)
    for variable in ("XLA_FLAGS", "TRITON_PTXAS_PATH", "NVIDIA_TF32_OVERRIDE", "LD_LIBRARY_PATH"):
        with monkeypatch.context() as patch:
            patch.setenv(variable, "--xla_gpu_deterministic_ops=true")
            keys[variable] = key(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(executable_cache, "_installed", lambda: ["jax-0.0.1.dist-info"])
        keys["versions"] = key(tmp_path)
        patch.undo()
        patch.setattr(executable_cache, "_device_key", lambda device: "another GPU")
        keys["device kind"] = key(tmp_path)
    for variable in ("HOME", "CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH"):
        monkeypatch.setenv(variable, "elsewhere")
    assert key(tmp_path) == keys["base"]
    source.write_text("x = 2")
    keys["a source file"] = key(tmp_path)
    assert len(set(keys.values())) == len(keys)


def test_the_values_of_arguments_do_not_matter(tmp_path, source):
    assert key(tmp_path, arguments=(np.uint32(5),)) == key(tmp_path, arguments=(np.uint32(6),))
    abstract = jax.ShapeDtypeStruct((3,), jnp.float32, sharding=jnp.arange(3.0).sharding)
    assert key(tmp_path, arguments=(abstract,)) == key(tmp_path)


def test_every_source_is_read():
    files = executable_cache.source_files()
    root = HERE.parent.parent
    assert HERE in files and root / "tests" / "conftest.py" in files
    for name in (
        "src/gptjax/models/gpt2.py",
        "pallas_kernels/_triton.py",
        "pallas_kernels/attention/mosaic_tiles.json",
    ):
        assert root / name in files, name
    if main := getattr(sys.modules["__main__"], "__file__", None):  # a worker of pytest has none
        files -= {Path(main).resolve()}
    assert not any("site-packages" in file.parts or "__pycache__" in file.parts for file in files)
    assert Path(os.__file__).resolve() not in files


def test_versions_of_what_is_installed():
    names = " ".join(executable_cache._installed())
    for package in ("jax", "jaxlib", "flax", "optax"):
        assert f" {package}-{importlib.metadata.version(package)}.dist-info" in " " + names


def test_a_changed_source_is_compiled_again(cache, source):
    Compiler(cache, 1)(jax.jit(double), jnp.arange(3.0))
    source.write_text("x = 2")
    again = Compiler(cache, 1)
    again(jax.jit(double), jnp.arange(3.0))
    assert again.executables[0]["source"] == "compiled" and len(kept(cache)) == 2


@pytest.mark.parametrize("damage", ["cut off", "a bit", "empty"])
def test_a_damaged_file_is_named_and_compiled_again(cache, damage):
    x = jnp.arange(3.0)
    Compiler(cache, 1)(jax.jit(double), x)
    (file,) = kept(cache)
    good = file.read_bytes()
    bad = bytearray(good)
    bad[len(bad) // 2] ^= 1
    file.write_bytes({"cut off": good[:-100], "a bit": bytes(bad), "empty": b""}[damage])
    traced.clear()
    jax.clear_caches()
    again = Compiler(cache, 1)
    assert again(jax.jit(double), x)(x).tolist() == [0, 2, 4] and traced == ["double"]
    assert again.notes == [
        f"double is compiled again, {file} cannot be read: ValueError: its checksum is wrong"
    ]
    after = Compiler(cache, 1)
    after(jax.jit(double), x)
    assert after.executables[0]["source"] == "executable cache" and not after.notes


def test_a_file_under_another_key_is_not_loaded(cache):
    x = jnp.arange(3.0)
    Compiler(cache, {"learning_rate": 1})(jax.jit(double), x)
    (file,) = kept(cache)
    other = Compiler(cache, {"learning_rate": 2})
    file.rename(file.with_name(other._stored.key(jax.jit(double), (x,), {})))
    other(jax.jit(double), x)
    assert (
        "its checksum is wrong" in other.notes[0] and other.executables[0]["source"] == "compiled"
    )


def test_the_cache_is_created_for_its_user_alone(tmp_path, source):
    before = os.umask(0o002)
    try:
        # the second reads what the first wrote with a umask that lets a group write
        for _ in range(2):
            compiler = Compiler(tmp_path / "parent" / "cache", 1)
            compiler(jax.jit(double), jnp.arange(3.0))
            jnp.full((5, 2), 0.25).sum()  # kept by JAX itself
            jax.clear_caches()
    finally:
        os.umask(before)
    folder = tmp_path / "parent" / "cache"
    assert [f.stat().st_mode & 0o777 for f in (folder, folder / "executables", *kept(folder))] == [
        0o700,
        0o700,
        0o600,
    ]
    assert compiler.executables[0]["source"] == "executable cache" and not compiler.notes
    assert any(file.stat().st_mode & 0o020 for file in folder.glob("jax/jit_*"))


@pytest.mark.parametrize("what", ["folder", "its file", "JAX's file"])
@pytest.mark.parametrize("who", ["owner", "others can write"])
def test_nothing_is_loaded_that_another_user_could_have_written(cache, monkeypatch, what, who):
    Compiler(cache, 1)(jax.jit(double), jnp.arange(3.0))
    (cache / "jit_x-cache").write_bytes(b"")
    cache.chmod(0o755)
    path = {"folder": cache, "its file": kept(cache)[0], "JAX's file": cache / "jit_x-cache"}[what]
    if who == "owner":
        stat, lstat = Path.stat, Path.lstat

        def owned_by_another(real, self, **how):
            status = list(real(self, **how))
            status[4] += self == path
            return os.stat_result(status)

        monkeypatch.setattr(Path, "stat", lambda self, **how: owned_by_another(stat, self, **how))
        monkeypatch.setattr(Path, "lstat", lambda self: owned_by_another(lstat, self))
    else:
        path.chmod(path.stat().st_mode | 0o020)
    monkeypatch.setattr(
        executable_cache.pickle, "loads", lambda body: pytest.fail("a pickle was loaded")
    )
    expected = "expected owner" if who == "owner" else "other users can write, mode"
    with pytest.raises(
        ConfigError, match=f"executables in {cache} could run .*{expected}.*--compilation-cache"
    ):
        Compiler(cache, 1)


def test_a_link_is_not_followed(cache):
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(3.0))
    (file,) = kept(cache)
    file.rename(cache.with_name("elsewhere"))
    file.symlink_to(cache.with_name("elsewhere"))
    with pytest.raises(OSError, match="symbolic links"):
        compiler._stored.load(file.name)
    with pytest.raises(ConfigError, match="found a link"):
        Compiler(cache, 1)
    # The folder itself may be a link to one of the same user.
    file.unlink()
    link = cache.with_name("link")
    link.symlink_to(cache)
    assert Compiler(link, 1).notes == []


def test_a_file_that_another_user_wrote_after_the_start_is_not_loaded(cache, monkeypatch):
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(3.0))
    (file,) = kept(cache)
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="expected owner"):
        compiler._stored.load(file.name)


@pytest.mark.parametrize("devices", [1, 2])
def test_donation_shardings_and_memory_are_those_of_the_compiled_program(cache, devices):
    mesh = Mesh(np.array(jax.devices("cpu")[:devices]), ("data",))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())

    def update(state, x):
        return {"w": state["w"] + x.sum(), "n": state["n"] + 1}, x.mean()

    step = jax.jit(update, donate_argnums=0, out_shardings=whole)
    abstract = {"w": jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=whole)}
    abstract["n"] = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    windows = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=split)
    made = [Compiler(cache, 1)(step, abstract, windows) for _ in range(2)]
    assert len(kept(cache)) == 1
    results = []
    for program in made:
        state = jax.device_put({"w": np.zeros(1000, np.float32), "n": np.int32(0)}, whole)
        for i in range(3):
            before = state
            state, mean = program(state, jax.device_put(np.full((8, 4), i, np.float32), split))
            assert before["w"].is_deleted() and before["n"].is_deleted()
            assert (
                state["w"].sharding.is_equivalent_to(whole, 1)
                and len(state["w"].devices()) == devices
            )
        results.append([state["w"].tolist(), int(state["n"]), float(mean)])
    assert results[0] == results[1] == [[96.0] * 1000, 3, 2.0]
    compiled, loaded = (program.memory_analysis() for program in made)
    assert loaded.alias_size_in_bytes == compiled.alias_size_in_bytes >= 4000
    assert needed_bytes(made[0]) == needed_bytes(made[1])


def test_only_the_newest_stay_and_reading_counts(cache, monkeypatch):
    monkeypatch.setattr(executable_cache, "NEWEST", 3)

    def age():
        """All files of now become older than what comes."""
        for file in kept(cache):
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 10))

    for n in (1, 2, 3, 1, 4):
        Compiler(cache, 1)(jax.jit(double), jnp.zeros(n))
        age()
    found = {}
    for n in (1, 2, 3, 4):
        compiler = Compiler(cache, 1)
        found[n] = compiler._stored.key(jax.jit(double), (jnp.zeros(n),), {}) in compiler._stored
    assert found == {1: True, 2: False, 3: True, 4: True} and len(kept(cache)) == 3


def test_a_file_is_whole_or_not_there(cache, monkeypatch):
    def full(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    compiler = Compiler(cache, 1)
    assert compiler(jax.jit(double), jnp.arange(2.0))(jnp.arange(2.0)).tolist() == [0, 2]
    assert (
        kept(cache) == []
        and "double is not stored: OSError: [Errno 28] No space left" in compiler.notes[0]
    )


def test_a_source_that_changed_after_it_was_loaded_is_no_key(cache, source, monkeypatch):
    monkeypatch.setattr(executable_cache, "_process_began", lambda: HERE.stat().st_mtime + 1)
    os.utime(source, (0, HERE.stat().st_mtime + 2))
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(2.0))
    assert compiler.notes == [
        f"double is not stored: {source} has changed since this process began"
    ]
    assert kept(cache) == []


def test_nor_is_one_that_changed_before_the_program_was_kept(cache, source, monkeypatch):
    began = max(file.stat().st_mtime for file in (HERE, source))
    monkeypatch.setattr(executable_cache, "_process_began", lambda: began)

    def edit(x):
        os.utime(source, (0, began + 1))
        return x

    compiler = Compiler(cache, 1)
    compiler(jax.jit(edit), jnp.arange(2.0))
    assert compiler.notes == [
        f"edit is not stored: NoKey: {source} has changed since this process began"
    ]
    assert kept(cache) == []


def test_when_a_process_began(tmp_path):
    """After the last change of its script, although the system counts time in ticks."""
    file = tmp_path / "script.py"
    file.write_text(
        "import time; now = time.time()\n"
        "from pathlib import Path\n"
        "from gptjax.training import executable_cache as cache\n"
        "began = cache._process_began()\n"
        "print(now - began, began - Path(__file__).stat().st_mtime)\n"
    )
    done = subprocess.run([sys.executable, file], check=True, capture_output=True, text=True)
    since_start, since_change = map(float, done.stdout.split())
    assert -0.1 < since_start < 5 and since_change >= 0


def test_what_was_typed_in_has_no_key(tmp_path, source):
    names = {}
    exec("def typed(x):\n    return x", names)
    with pytest.raises(executable_cache.NoKey, match="its source is in no file"):
        key(tmp_path, function=names["typed"])


def test_what_jaxs_cache_has_is_stored_too(cache):
    Compiler(cache)(jax.jit(double), jnp.arange(6.0))
    jax.clear_caches()
    compilation_cache.reset_cache()  # JAX reads the folder's name once per process
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(6.0))
    assert compiler.executables[0]["source"] == "compiled" and len(kept(cache)) == 1


def test_several_processes_keep_nothing_whole(cache, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(2.0))
    assert kept(cache) == [] and compiler.executables[0]["source"] == "compiled"


def test_modules_that_a_program_needs_are_imported_before_it_is_read(cache, tmp_path, monkeypatch):
    (tmp_path / "needed_by_a_program.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        executable_cache, "NEEDED", ("needed_by_a_program", "not_imported_when_it_was_kept")
    )
    importlib.import_module("needed_by_a_program")
    Compiler(cache, 1)(jax.jit(double), jnp.arange(3.0))
    monkeypatch.delitem(sys.modules, "needed_by_a_program")
    compiler = Compiler(cache, 1)
    compiler(jax.jit(double), jnp.arange(3.0))
    assert compiler.executables[0]["source"] == "executable cache"
    assert (
        "needed_by_a_program" in sys.modules and "not_imported_when_it_was_kept" not in sys.modules
    )
