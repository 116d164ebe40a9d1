"""examples/sharded/: equal losses on one device and on four, and kernels on the shards."""

import json
import os
import re
from pathlib import Path

import pytest
from process_tools import python

FOLDER = Path(__file__).parents[1] / "examples" / "sharded"
STYLES = [path.stem for path in sorted(FOLDER.glob("*.py")) if path.stem != "training"]
# Compile the step with the Triton kernels; print what it selects, and the executable.
COMPILE = """
import json, runpy, sys
import kernel_tools, training
from pallas_kernels import _dispatch, _triton
from pallas_kernels.extend import recorded

def compile(step, state):
    with recorded() as choices:
        lowered = step.lower(state, training.TOKENS_BT)
    compiled = lowered.compile()
    text = getattr(compiled, "compiled", compiled).as_text()  # Equinox wraps the executable
    print(json.dumps([{choice.operation: choice.back_end for choice in choices}, text]))

_triton.call, _dispatch.why_not_triton = kernel_tools.interpret_call, lambda: None
training.train = compile
runpy.run_path(sys.argv[1])
"""


def run(*arguments, devices):
    """Return what Python prints with so many CPU devices."""
    path = [str(FOLDER), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    return python(*arguments, XLA_FLAGS=flags, PYTHONPATH=os.pathsep.join(path))


def losses(text):
    return [float(loss) for loss in text.splitlines()[-1].removeprefix("losses ").split()]


def test_the_folder_has_a_short_script_for_each_style():
    assert STYLES == ["equinox_block", "linen_block", "nnx_block", "plain_jax"]
    lengths = [len((FOLDER / f"{style}.py").read_text().splitlines()) for style in STYLES]
    assert max(lengths) <= 60


@pytest.mark.parametrize("style", STYLES)
def test_the_losses_of_four_devices_are_those_of_one_and_fall(style):
    script = str(FOLDER / f"{style}.py")
    one, four = (run(script, devices=devices) for devices in (1, 4))
    assert four.startswith("4 cpu devices, mesh {'data': 2, 'model': 2}\nflash_attention: xla")
    assert losses(four) == pytest.approx(losses(one), abs=1e-4)
    assert losses(one) == sorted(losses(one), reverse=True) and losses(one)[-1] < 4
    assert len(losses(one)) == 5


@pytest.mark.parametrize("style", STYLES)
def test_four_devices_launch_kernels_on_their_shards(style):
    """Attention on half of the batch and of the heads, the MLP on half of its hidden channels. The
    collectives are sums: nothing is gathered."""
    choices, text = json.loads(run("-c", COMPILE, str(FOLDER / f"{style}.py"), devices=4))
    assert {choices[name] for name in ("flash_attention", "mlp", "rms_norm")} == {"triton"}
    assert choices["linear_cross_entropy"] == "fused"
    launches = re.findall(r" = (.*?) custom-call\(.*xla_ffi_python", text)
    shapes = {shape for launch in launches for shape in re.findall(r"f32\[([\d,]+)\]", launch)}
    assert {"8,64,2,32", "512,256", "512,128"} <= shapes  # (B, T, H, D), (N, F) and (N, C)
    assert not any(shape.startswith(("16,", "1024,")) for shape in shapes)
    collectives = re.findall(r" (all-\w+|collective-permute|reduce-scatter)(?:-start)?\(", text)
    assert {*collectives} == {"all-reduce"}
