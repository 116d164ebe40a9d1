"""benchmarks/tools/mosaic_sass.py: figures of a kernel, and errors name what is missing. The
compilation itself needs JAX's CUDA wheels."""

import importlib

import pytest


@pytest.fixture
def tool():
    return importlib.import_module("mosaic_sass")


def test_figures_of_a_kernel(tool):
    report = """
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : (C7519) Another remark
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1 bytes smem
"""
    sass = """
   -:-:-:Y:01        /*0000*/                   LDC R1, c[0x0][0x28]
   2:-:-:-:04        /*00c0*/              @!P0 HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24
   2:-:-:-:04        /*10d0*/                   QGMMA.64x128x32.F32.E4M3 R24, gdesc[UR4], R24
"""
    figures = {"registers": 168, "spilled bytes": 8, "wgmma": 2, "instructions": 3}
    assert tool.figures(report, sass) == figures | {"remarks": ["C7510"]}


def test_every_program_can_be_made(tool):
    assert {"xxt", "linear_gelu", "flash_attention D=64"} <= set(tool.programs())


def test_errors(tool, tmp_path, capsys):
    assert tool.main(["--kernels", "nonsense", "--plugin", str(tmp_path)]) == 1
    assert "error: unknown kernels ['nonsense']; choose from [" in capsys.readouterr().err
    assert tool.main(["--plugin", str(tmp_path)]) == 1
    assert "xla_cuda_plugin.so is not there; --help tells how" in capsys.readouterr().err
