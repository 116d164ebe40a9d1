"""Concurrent compilation, the cache on disk, and the error for a step that does not fit into
memory."""

import contextvars
import dataclasses
import functools
import importlib.util
import os
import sys
import types
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from gptjax.config import Config, ConfigError
from gptjax.models.gpt2 import GPT2Config
from gptjax.training import compilation
from gptjax.training.imports import without_torch
from gptjax.training.memory import available_bytes, needed_bytes
from pallas_kernels import _dispatch, _triton, transpose_add, transpose_copy


def compiled_for(n: int) -> jax.stages.Compiled:
    """A program whose memory grows with n."""
    x = jax.ShapeDtypeStruct((n, 1024), jnp.float32)
    return jax.jit(lambda x: jnp.sort(x, axis=0)).lower(x).compile()


def config(micro_batch):
    return Config(sequence_length=1, batch_tokens=micro_batch, micro_batch=micro_batch)


@pytest.fixture
def cache_settings():
    """No folder of other tests, and JAX's own settings again afterwards."""
    compilation_cache.reset_cache()  # JAX reads the folder's name once per process
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)


def double(x):
    return 2 * x


def test_two_programs_at_once():
    compiler, x = compilation.Compiler(None), jnp.arange(3.0)
    begun = [compiler.start(jax.jit(f), x) for f in (double, lambda x: x * x)]
    assert [one.result()(x).tolist() for one in begun] == [[0, 2, 4], [0, 1, 4]]
    assert compiler.seconds > 0 and str(compiler).endswith("s (no cache)")


def test_each_triton_kernel_is_compiled_once_before_lowering(monkeypatch):
    """Also inside a loop; launches that differ in a constant have kernels of their own."""
    triton_lib = _triton.jax_triton.triton_lib
    compiled = []

    def compile_kernel(self, spec, *_):
        compiled.append((self.name, spec.constants["R"]))
        raise RuntimeError("no GPU")

    gpu = types.SimpleNamespace(get_compute_capability=lambda device: 90)
    monkeypatch.setattr(triton_lib, "triton_kernel_call_lib", gpu)
    monkeypatch.setattr(triton_lib.TritonFunction, "_compile_kernel", compile_kernel)
    monkeypatch.setattr(_dispatch, "why_not_triton", lambda: None)

    def copy(x):
        return transpose_copy(x, implementation="triton")

    def f(x):
        x, _ = jax.lax.scan(lambda x, _: (copy(copy(x)), None), x, length=2)
        return copy(x), transpose_add(jnp.zeros((32, 64)), x, implementation="triton")

    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    jaxpr = jax.jit(f).trace(x).jaxpr.jaxpr
    with pytest.raises(RuntimeError, match="no GPU"):
        compilation.compile_triton_kernels(jaxpr)
    assert sorted(compiled) == [("transpose", 32), ("transpose", 64), ("transpose", 64)]


def test_pytorch_is_hidden_from_the_context_and_its_copies_alone(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    find = functools.partial(importlib.util.find_spec, "torch")
    with without_torch(), ThreadPoolExecutor() as threads:
        assert threads.submit(find).exception() is None
        for hidden in (find, threads.submit(contextvars.copy_context().run, find).result):
            with pytest.raises(ModuleNotFoundError, match="not needed"):
                hidden()
    find()


def test_a_program_that_cannot_be_compiled_says_so_where_it_is_waited_for():
    # The CPU has no such custom call.
    f = jax.ffi.ffi_call("gptjax_no_such_call", jax.ShapeDtypeStruct((3,), jnp.float32))
    future = compilation.Compiler(None).start(jax.jit(lambda x: f(x)), jnp.arange(3.0))
    with pytest.raises(Exception, match="gptjax_no_such_call"):
        future.result()


def test_the_cache_keeps_small_programs_too(tmp_path, cache_settings):
    """JAX finds its own executables again, also small ones, in a folder for this user alone."""

    def counts():
        # The tests before have compiled some: each compiler begins without executables in memory.
        jax.clear_caches()
        compiler = compilation.Compiler(tmp_path / "parent" / "cache")
        compiler.start(jax.jit(double), jnp.arange(5.0)).result()
        jnp.full((7, 3), 0.5).sum()
        found = compiler.summary()
        return found["cache_hits"], found["cache_misses"], str(compiler).split("(")[1]

    hits, misses, cold = counts()
    assert hits == 0 < misses and cold.startswith("miss, cache ")
    again, missed, warm = counts()
    assert again == misses and missed == 0 and warm.startswith("hit, cache ")
    assert (tmp_path / "parent" / "cache").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("below", ["", "below"])
def test_a_cache_that_cannot_be_created_is_noted(tmp_path, below):
    (tmp_path / "file").write_text("")
    compiler = compilation.Compiler(tmp_path / "file" / below)
    assert compiler.note.startswith("no cache: ") and "JAX_COMPILATION_CACHE_DIR" in compiler.note
    x = jnp.arange(2.0)
    assert compiler.start(jax.jit(double), x).result()(x).tolist() == [0, 2]
    assert "(no cache: " in str(compiler) and jax.config.jax_compilation_cache_dir is None


@pytest.mark.parametrize("mode", [0o775, 0o770, 0o702])
def test_a_cache_that_another_user_can_write_is_refused(tmp_path, mode):
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match=f"can write, found .* mode {mode:o}.*chmod go-w"):
        compilation.Compiler(tmp_path)
    tmp_path.chmod(0o755)
    assert compilation.Compiler(tmp_path).note is None


def test_a_cache_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="expected a folder that only user .* found user"):
        compilation.Compiler(tmp_path)


@pytest.mark.parametrize(
    "available, chunk, message",
    [
        (25, None, r"--micro-batch 96 needs .* GiB on each device.*--micro-batch 24 fits"),
        (25, 16, r"--micro-batch 96 needs .*--micro-batch 16 fits"),  # the chunk divides 16
        (None, None, "No micro-batch of this model.*recompute"),
    ],
)
def test_a_step_that_does_not_fit_names_the_largest_micro_batch_that_does(
    monkeypatch, available, chunk, message
):
    most = 1000 if available is None else needed_bytes(compiled_for(available))
    monkeypatch.setattr(compilation, "available_bytes", lambda device: most)
    chunked = dataclasses.replace(config(96), model=GPT2Config(loss_chunk=chunk))
    with pytest.raises(ConfigError, match=message):
        compilation.compile_to_fit(compiled_for, chunked, jax.devices("cpu")[0])


def test_what_fits_is_compiled_once():
    asked = []
    compile_step = lambda n: asked.append(n) or compiled_for(n)
    compilation.compile_to_fit(compile_step, config(8), jax.devices("cpu")[0])
    assert asked == [8]


def test_needed_bytes_are_arguments_results_and_temporaries():
    small, large = needed_bytes(compiled_for(64)), needed_bytes(compiled_for(512))
    assert small >= 64 * 1024 * 4 and 6 * small < large < 10 * small
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    donated, kept = (
        needed_bytes(jax.jit(double, donate_argnums=d).lower(x).compile()) for d in ((0,), ())
    )
    assert kept - donated == 1024 * 1024 * 4
    assert available_bytes(jax.devices("cpu")[0]) > 2**30
