"""The tests of examples/new_kernel, with the fixtures of this folder."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "examples" / "new_kernel"))
pytest.register_assert_rewrite("test_glu")

from test_glu import *  # noqa: E402, F403
