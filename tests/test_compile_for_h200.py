"""benchmarks/tools/compile_for_h200.py: bytes of launches, and errors. The compilation itself needs
JAX's CUDA wheels."""

import importlib

import pytest

TEXT = """
%fused (p: f32[4,8]) -> bf16[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  ROOT %c = bf16[4,8]{1,0} convert(%p)
}

ENTRY %main (x: f32[4,8], w: f8e4m3fn[8,8]) -> bf16[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %w = f8e4m3fn[8,8]{1,0} parameter(1)
  %loop_fusion.1 = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %loop_fusion.2 = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
  %gemm = (bf16[4,8]{1,0}, s8[64]{0}) custom-call(%loop_fusion.1, %w, %w), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(f)/jvp(mlp)/dot_general"}
  ROOT %y = bf16[4,8]{1,0} get-tuple-element(%gemm), index=0
}
"""


@pytest.fixture(scope="module")
def tool():
    return importlib.import_module("compile_for_h200")


def test_bytes_of_launches(tool):
    fusions, matmul = tool.launch_bytes(TEXT)
    assert fusions["launch"] == "loop_fusion" and fusions["calls"] == 2
    assert (fusions["opcode"], matmul["opcode"]) == ("fusion", "custom-call")
    assert fusions["bytes"] == 2 * (128 + 64)
    # The workspace of 64 bytes counts, the second use of w does not.
    assert matmul["bytes"] == 64 + 64 + 64 + 64
    assert matmul["launch"] == "__cublas$lt$matmul" and matmul["part"] == "MLP"
    assert matmul["result"] == "(bf16[4,8])"


def test_errors(tool, tmp_path, capsys):
    assert tool.main(["--plugin", str(tmp_path)]) == 1
    assert "xla_cuda_plugin.so is not there; --help tells how" in capsys.readouterr().err
