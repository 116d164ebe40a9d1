"""README, docs and configs: the examples run as printed, and what they name exists."""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gptjax import config as configuration
from gptjax.data import TokenizerUnavailable, get_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Sizes that two CPU cores run in seconds; everything else runs as printed.
SMALLER = {
    "GPT2Config(": "GPT2Config(n_layer=1, n_head=2, n_embd=32, ",
    "(4, 1025)": "(1, 65)",
    "max_new_tokens=64": "max_new_tokens=4",
    "N, C, V = 4096, 768, 50304": "N, C, V = 64, 128, 512",
    "(4, 1024, 3, 12, 64)": "(1, 64, 3, 2, 64)",
}


def read(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """The Python blocks of a page."""
    return re.findall(r"^```python\n(.*?)^```", read(page), flags=re.DOTALL | re.MULTILINE)


EXAMPLES = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page))
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_an_example_runs(block, tmp_path):
    """In a process of its own, without the strict settings of these tests."""
    if 'get_tokenizer("gpt2")' in block:
        try:
            get_tokenizer("gpt2")
        except TokenizerUnavailable:
            pytest.skip("no network, and TIKTOKEN_CACHE_DIR names no copy of GPT-2's BPE files")
    for printed, smaller in SMALLER.items():
        block = block.replace(printed, smaller)
    done = subprocess.run(
        [sys.executable, "-c", block],
        cwd=tmp_path,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert ("A language model is" in done.stdout) == ("generate(" in block)


def test_the_examples_have_the_sizes_that_are_replaced():
    text = "".join(block for page in PAGES for block in blocks(page))
    assert [printed for printed in SMALLER if printed not in text] == []


def resolves(name):
    """Whether a dotted name is a module or an attribute, looked up as a user's code does it.

    `pallas_kernels.linear_gelu` is a function, which hides the module of that name.
    """
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for i, part in enumerate(parts):
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join([package, *parts[: i + 1]]))
            except ModuleNotFoundError:
                return False
        found = getattr(found, part, None)
    return found is not None


def test_a_hidden_module_is_not_found():
    assert resolves("gptjax.optim.normuon") and resolves("pallas_kernels.linear_gelu")
    assert not resolves("pallas_kernels.linear_gelu.mlp") and not resolves("gptjax.nothing")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_names_of_a_page_resolve(page):
    """Dotted names of gptjax and pallas_kernels in code, and modules behind `python -m`."""
    text = read(page)
    code = (
        re.findall(r"`([^`\n]+)`", text)
        + blocks(page)
        + re.findall(r"^    (.+)$", text, flags=re.MULTILINE)
    )
    names = {
        name for part in code for name in re.findall(r"\b(?:gptjax|pallas_kernels)(?:\.\w+)+", part)
    }
    commands = {name for part in code for name in re.findall(r"python -m (gptjax\S*)", part)}
    assert [name for name in sorted(names) if not resolves(name)] == []
    assert [name for name in sorted(commands) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page):
    text = read(page)
    links = [
        link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    commands = re.findall(r"\b((?:benchmarks|tests|configs)/[\w/]+\.py)\b", text)
    assert [path for path in commands if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_a_table_has_one_header(page):
    """A row after an empty line has no header: it is shown as text."""
    rows = [line.startswith("|") for line in read(page).splitlines()] + [False]
    lines = [*read(page).splitlines(), ""]
    starts = [i for i, is_row in enumerate(rows) if is_row and (i == 0 or not rows[i - 1])]
    assert [lines[i] for i in starts if not re.fullmatch(r"\|( ?:?-+:? ?\|)+", lines[i + 1])] == []


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_a_config_states_the_tokens_that_it_needs(path):
    """Shards of 100 M tokens for all steps, and the time that follows from the tokens/s named."""
    text, config = path.read_text(encoding="utf-8"), configuration.load(path)
    tokens = config.max_steps * config.batch_tokens
    if shards := re.search(r"--shards (\d+)", text):
        assert int(shards[1]) == min(103, -(-tokens // 100_000_000))
    if speed := re.search(
        r"([\d.]+) hours on one H200, at the ([\d,]+) tokens/s of (docs/\w+\.md)", text
    ):
        hours = tokens / int(speed[2].replace(",", "")) / 3600
        assert float(speed[1]) == pytest.approx(hours, rel=0.03)
        assert f"**{speed[2]}**" in read(
            ROOT / speed[3]
        )  # the newest figure, which is the bold one
