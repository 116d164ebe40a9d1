"""pallas_kernels.extend, and the tests of examples/new_kernel with the fixtures of this folder."""

import ast
import sys
from pathlib import Path

import pytest

from pallas_kernels import extend

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "examples" / "new_kernel"))
pytest.register_assert_rewrite("test_glu")

from test_glu import *  # noqa: E402, F403


def test_extend_exports_every_public_name():
    tree = ast.parse(Path(extend.__file__).read_text())
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imported for alias in node.names} - {"Any"}
    assert {*extend.__all__} == names | {"tracing_for", "triton_call"}


@pytest.mark.parametrize("folder", ["examples", "src"])
def test_other_folders_import_no_private_module_of_pallas_kernels(folder):
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            private = [n for n in names if n.startswith("pallas_kernels.") and "._" in n]
            assert not private, f"{path} imports {private}"
