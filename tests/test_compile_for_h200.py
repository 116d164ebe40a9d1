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


def test_launches_and_collectives():
    sharded = importlib.import_module("compile_sharded")
    text = """
  %k = (f32[2,8]{1,0}, f32[4]{0}) custom-call(%x), custom_call_target="norm_backward", x={}
  %gemm = f32[4,8]{1,0} custom-call(%k, %k), custom_call_target="__cublas$gemm"
  %s = ((f32[4]{0}, f32[2]{0}), (f32[4]{0}, f32[2]{0})) all-reduce-start(%a, %b), channel_id=1
  %d = (f32[4]{0}, f32[2]{0}) all-reduce-done(%s)
  %g = bf16[8,3]{1,0} all-gather(%y), dimensions={0}
"""
    found = sharded.launches_and_collectives(text)
    collectives = [("all-gather", 24), ("all-reduce", 6)]
    assert found == ({"norm_backward": 1}, collectives, ["2,8", "4"])
    assert sharded.main(["--plugin", "nowhere"]) == 1
