"""The public names of gptjax and pallas_kernels, and when each is imported."""

import importlib
import json
import re
import sys
from pathlib import Path

import pytest
from process_tools import python

import gptjax
import gptjax.data
import gptjax.optim
import gptjax.weights
import pallas_kernels

NAMES = set(
    "Batch Config GPT2 GPT2Config Llama3 Llama3Config OptimizerConfig PRESETS Parallel Precision "
    "Speedrun SpeedrunConfig Stage generate init_state load load_hf load_llmc loss_fn "
    "make_train_step save_hf save_llmc".split()
)


def test_public_names_are_listed_and_are_what_their_modules_define():
    assert {*gptjax.__all__} == NAMES and NAMES <= {*dir(gptjax)}
    for name in NAMES:
        module = importlib.import_module(f"gptjax.{gptjax._MODULE_OF[name]}")
        assert getattr(module, name) is getattr(gptjax, name)
    assert {"linear", "mlp", "projected_attention"} <= {*pallas_kernels.__all__}
    assert all(callable(getattr(pallas_kernels, name)) for name in pallas_kernels.__all__)


def test_pyright_knows_the_type_of_every_public_name(tmp_path):
    """The TYPE_CHECKING block of gptjax, which never runs, is what pyright reads."""
    for package in (gptjax, pallas_kernels):
        assert (Path(package.__file__).parent / "py.typed").is_file()
    pytest.importorskip("pyright", reason="pyright is in the extra `dev`")
    packages = (gptjax, gptjax.data, gptjax.optim, gptjax.weights, pallas_kernels)
    names = [f"{package.__name__}.{name}" for package in packages for name in package.__all__]
    imports = [f"import {package.__name__}" for package in packages]
    lines = imports + [f"reveal_type({name})" for name in names]
    (tmp_path / "user.py").write_text("\n".join(lines))
    pyright = ("-m", "pyright", "--outputjson", "--pythonpath", sys.executable)
    shown = python(*pyright, cwd=tmp_path, PYRIGHT_PYTHON_IGNORE_WARNINGS="1")
    said = [found["message"] for found in json.loads(shown)["generalDiagnostics"]]
    types = dict(
        re.fullmatch(r'Type of "(.+?)" is "(.+)"', text, re.DOTALL).groups() for text in said
    )
    assert [*types] == names  # and no warning
    assert [name for name in names if re.search(r"(^|^\(.*\) -> )Unknown$", types[name])] == []


def test_submodules_are_loaded_at_their_first_use():
    code = (
        "import sys, gptjax\n"
        "names = dir(gptjax)\n"
        "assert {'config', 'data', 'models', 'optim', 'training', 'weights', '__version__'} <= "
        "{*names}, names\n"
        "assert 'jax' not in sys.modules\n"
        "print(gptjax.config.Config.__name__, gptjax.optim.normuon.__name__, "
        "gptjax.training.__name__)\n"
        "try:\n"
        "    gptjax.nothing\n"
        "except AttributeError as error:\n"
        "    print(error)\n"
    )
    shown = python("-c", code)
    assert shown == "Config normuon gptjax.training\nmodule 'gptjax' has no attribute 'nothing'\n"


@pytest.mark.parametrize(
    "module, absent",
    [
        ("gptjax.data.__main__", "jax grain"),
        ("pallas_kernels.extend", "triton jax_triton pallas_kernels._mosaic"),
    ],
)
def test_an_import_does_not_load_what_it_may_not_need(module, absent):
    loaded = python("-c", f"import sys, {module}; print(*sys.modules)").split()
    assert module in loaded and not {*absent.split()} & {*loaded}


def test_the_kernels_need_jax_only():
    """Without gptjax's other dependencies: each import of these fails."""
    code = (
        "import sys\n"
        "for name in 'gptjax flax optax orbax grain tyro tiktoken jaxtyping safetensors "
        "beartype'.split():\n"
        "    sys.modules[name] = None\n"
        "import jax, jax.numpy as jnp, typing, pallas_kernels, pallas_kernels.extend\n"
        "typing.get_type_hints(pallas_kernels.flash_attention)\n"
        "q = jnp.ones((1, 4, 2, 8))\n"
        "total = lambda q: pallas_kernels.flash_attention(q, q, q).sum()\n"
        "print(jax.grad(total)(q).shape, *sorted(pallas_kernels.__all__))"
    )
    shape = "(1, 4, 2, 8)"
    assert python("-c", code).strip() == " ".join([shape, *sorted(pallas_kernels.__all__)])
