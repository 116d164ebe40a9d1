"""The imports between files: no circle, no private module of JAX, and one direction of layers."""

import ast
import functools
from pathlib import Path

import gptjax
import pallas_kernels

SRC, KERNELS = (Path(package.__file__).parent for package in (gptjax, pallas_kernels))
TRAIN = Path(__file__).parent.parent / "train.py"
# A file of a layer imports files of its own layer and of lower layers only, which stand below it.
LAYERS = (
    "__main__ bench checkpoints doctor evaluate export init model_options plan plot sample train",
    "processes training",
    "evaluation generation weights",
    "cli config stages timeline",
    "models",
    "optim",
    "parallel",
    "data",
    "devices precision",
    "fields files provenance scripts terminal user_folders",
)


@functools.cache
def modules() -> dict[str, Path]:
    """Return the files of both packages by module."""
    found = {}
    for package in (SRC, KERNELS):
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def names_of(path: Path) -> set[str]:
    """Return the full names that a file imports, also inside of functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return the modules of both packages that each module imports."""
    found = {}
    for module, path in modules().items():
        wanted = (name if name in modules() else name.rpartition(".")[0] for name in names_of(path))
        found[module] = {name for name in wanted if name in modules()} - {module}
    return found


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Return the modules that `start` imports, directly or through others."""
    seen, todo = set(), [start]
    while todo:
        new = graph[todo.pop()] - seen
        seen |= new
        todo += new
    return seen


def test_no_circle():
    circles = {module for module in modules() if module in reachable(imports(), module)}
    assert not circles, "these modules import each other"


def test_no_private_module_of_jax():
    private = [
        (str(path), name)
        for path in (*modules().values(), TRAIN)
        for name in names_of(path)
        if name.startswith(("jax.", "jaxlib.")) and any(p[0] == "_" for p in name.split("."))
    ]
    assert not private


def test_no_import_of_an_upper_layer():
    rank = {name: i for i, layer in enumerate(LAYERS) for name in layer.split()}

    def room(module: str) -> str:
        return module.split(".")[1] if "." in module else ""

    of_gptjax = [module for module in modules() if module.startswith("gptjax.")]
    unknown = {room(module) for module in of_gptjax} - rank.keys()
    assert not unknown, "add these modules to LAYERS"
    upwards = {
        (module, other)
        for module in of_gptjax
        for other in imports()[module]
        if other.startswith("gptjax.") and rank[room(other)] < rank[room(module)]
    }
    assert upwards == set()


def test_the_kernels_import_neither_gptjax_nor_from_below_an_operation():
    for module in modules():
        if module.split(".")[0] == "pallas_kernels":
            others = imports()[module]
            assert not {name for name in others if name.startswith("gptjax")}, module
            if module.startswith("pallas_kernels._") or module == "pallas_kernels.extend":
                assert all(name.startswith("pallas_kernels._") for name in others), module
