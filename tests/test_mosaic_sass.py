"""benchmarks/tools/mosaic_sass.py: the modules of a lowered program are read completely, and errors
name what is missing."""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels


@pytest.fixture
def tool():
    return importlib.import_module("mosaic_sass")


def test_modules_of_a_program(tool):
    (module,) = tool.modules(
        functools.partial(pallas_kernels.xxt, implementation="mosaic"),
        (jax.ShapeDtypeStruct((2, 128, 128), jnp.bfloat16),),
    )
    assert module.startswith(b"ML\xefR")  # MLIR's bytecode
    assert tool._unescaped(r"a\0A\n\t\22\"\\\FFz") == b'a\n\n\t""\\\xffz'


def test_every_program_can_be_made(tool):
    assert {"xxt", "linear_gelu", "flash_attention D=64"} <= set(tool.programs())


def test_errors(tool, tmp_path, capsys):
    assert tool.main(["--kernels", "nonsense"]) == 1
    assert "error: unknown kernels ['nonsense']; choose from [" in capsys.readouterr().err
    assert tool.main(["--plugin", str(tmp_path)]) == 1
    assert (
        "xla_cuda_plugin.so is not there; the head of mosaic_sass.py says how to get it"
        in capsys.readouterr().err
    )
