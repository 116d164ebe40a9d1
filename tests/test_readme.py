"""README, docs and configs: the examples run as printed, and what they name exists."""

import importlib
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
from process_tools import python

from gptjax import cli
from gptjax.data import TokenizerUnavailable, get_tokenizer
from gptjax.evaluation import EvaluationError
from gptjax.timeline import Timeline

ROOT = Path(__file__).parents[1]
TOP = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
PAGES = [*(ROOT / name for name in TOP), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("benchmarks", "configs", "docs", "examples", "pallas_kernels", "src", "tests")
# Options of TensorBoard, ruff, pip and Hugging Face's command; removed ones in CHANGELOG.md.
OTHERS = set(
    "--logdir --check --local-dir --executable-cache --torch --llmc --picture --moment-dtype "
    "--overlap-reduce --no-overlap-reduce --coordinator --connect-timeout --peak-tflops "
    "--resume-with-changes --process-count --process-index --sample-tokens --compilation-cache "
    "--log-every --eval-items --fp8-clipping-every --overfit-one-batch --need-gpu --lines "
    "--skip-bad-lines --interactive --back-end --no-deps".split()
)
PLACEHOLDER = r"\b[A-Z]{2,}\b"
# An example that reads GPT-2's tokenizer.
GPT2_FILES = r"""(get_tokenizer|load)\("(my_)?gpt2"\)"""
# Scripts of other programs, in docs/coming_from.md.
OTHER_SCRIPTS = {"dev/data/fineweb.py", "sample.py", "silu.py"}
# Sizes that two CPU cores run in seconds; everything else runs as printed.
SMALLER = {
    "GPT2Config(precision": "GPT2Config(n_layer=1, n_head=2, n_embd=32, precision",
    "(1, 4, 1025)": "(1, 1, 65)",
    "(100, 1, 8, 65)": "(5, 1, 8, 65)",
    "n_layer=2, n_head=2, n_embd=64": "n_layer=1, n_head=2, n_embd=32",
    "max_new_tokens=64": "max_new_tokens=4",
    "N, C, V = 4096, 768, 50304": "N, C, V = 64, 128, 512",
    "(4, 1024, 3, 12, 64)": "(1, 64, 3, 2, 64)",
}


def read(page):
    return page.read_text(encoding="utf-8")


def blocks(page):
    """The Python blocks of a page, and the reason of `<!-- not run: REASON -->` before a block."""
    pattern = r"^(?:<!-- not run: (needs a (?:GPU|download)) -->\n)?```python\n(.*?)^```"
    found = re.findall(pattern, read(page), flags=re.DOTALL | re.MULTILINE)
    return [(block, reason) for reason, block in found]


def code_of(page):
    return [block for block, _ in blocks(page)]


# Run each example in a folder and a namespace of its own, in one process: imports are the time.
RUN = """
import contextlib, io, json, os, sys, tempfile, traceback
results = {}
for name, code in json.load(sys.stdin).items():
    os.chdir(tempfile.mkdtemp(dir=sys.argv[1]))
    out, error = io.StringIO(), ""
    try:
        with contextlib.redirect_stdout(out):
            exec(compile(code, name, "exec"), {"__name__": "__main__"})
    except Exception:
        error = traceback.format_exc()
    results[name] = out.getvalue(), error
json.dump(results, sys.stdout)
"""


def test_the_examples_run(tmp_path):
    """Without the strict settings of these tests."""
    examples, needs_files, text = {}, False, ""
    try:
        get_tokenizer("gpt2")
    except TokenizerUnavailable:  # no network, and TIKTOKEN_CACHE_DIR has no copy
        needs_files = True
    for page in PAGES:
        for i, (block, reason) in enumerate(blocks(page)):
            name = f"{page.relative_to(ROOT)}, block {i}"
            code = compile(block, name, "exec")
            text += block
            for printed, smaller in SMALLER.items():
                block = block.replace(printed, smaller)
            if not reason and not (needs_files and re.search(GPT2_FILES, block)):
                examples[name] = block
            assert code.co_names, name
    assert [printed for printed in SMALLER if printed not in text] == []
    results = json.loads(python("-c", RUN, str(tmp_path), given=json.dumps(examples)))
    assert results.keys() == examples.keys() and len(results) >= 15
    assert [error for _, error in results.values() if error] == []
    for name, code in examples.items():
        assert ("A language model is" in results[name][0]) == ("generate(" in code), name


def resolves(name):
    """Whether a dotted name is a module or an attribute, looked up as a user's code does it."""
    package, *parts = name.split(".")
    found = importlib.import_module(package)
    for i, part in enumerate(parts):
        try:
            if not hasattr(found, part):
                importlib.import_module(".".join([package, *parts[: i + 1]]))
        except EvaluationError:  # names an extra that is not installed, for a known name
            return True
        except ModuleNotFoundError:
            return False
        found = getattr(found, part, None)
    return found is not None


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_names_of_a_page_resolve(page):
    """Dotted and imported names of gptjax and pallas_kernels in code, and modules behind
    `python -m`."""
    text = read(page)
    code = (
        re.findall(r"`([^`\n]+)`", text)
        + code_of(page)
        + re.findall(r"^    (.+)$", text, flags=re.MULTILINE)
    )
    names = {
        name for part in code for name in re.findall(r"\b(?:gptjax|pallas_kernels)(?:\.\w+)+", part)
    }
    for block in [block for block, reason in blocks(page) if reason]:  # not run
        for module, found in re.findall(r"^from ((?:gptjax|pallas_k)\S*) import (.*)", block, re.M):
            names |= {f"{module}.{name.strip()}" for name in found.split(",")}
    commands = {name for part in code for name in re.findall(r"python -m (gptjax\S*)", part)}
    assert [name for name in sorted(names) if not resolves(name)] == []
    assert [name for name in sorted(commands) if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_files_that_a_page_names_are_there(page):
    """Links, paths from the root of the repository, and the ends of paths of Python files."""
    text = read(page)
    links = [
        link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link
    ]
    assert [link for link in links if link and not (page.parent / link).exists()] == []
    paths = re.findall(rf"(?<![\w/.~$-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", text)
    # A word in capitals is a placeholder.
    assert [p for p in paths if not re.search(PLACEHOLDER, p) and not (ROOT / p).exists()] == []
    modules = re.findall(r"(?<![\w/.*{}~$-])(?:\.\./)*([\w./-]+\.py)\b", text)
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    parts = [file.relative_to(ROOT).parts for file in [ROOT / "train.py", *files]]
    names = {"/".join(part[i:]) for part in parts for i in range(len(part))}
    unknown = {name for name in modules if name not in names | OTHER_SCRIPTS}
    assert [name for name in unknown if not re.search(PLACEHOLDER, name)] == []


def anchors(page):
    """The anchors of a page's headings, as GitHub writes them."""
    headings = re.findall(
        r"^#+ (.*)", re.sub(r"^```.*?^```", "", read(page), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w -]", "", h.replace("`", "").lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_sections_that_a_page_links_to_are_there(page):
    links = re.findall(r"\]\(([^)\s:]*)#([^)\s]+)\)", read(page))
    wrong = [
        f"{file}#{section}"
        for file, section in links
        if section not in anchors(page.parent / file if file else page)
    ]
    assert wrong == []


# A script, or a module and its subcommand, which may follow a run's folder.
MODULE = r"-m gptjax\.[\w.]+(?: runs/\w+(?= [a-z]))?(?: [a-z][\w-]*)?"
SCRIPT = rf"train\.py|{MODULE}|(?:benchmarks|examples)/[\w/]+\.py"
COMMAND = re.compile(rf"python ({SCRIPT})([^`#\n]*)")
# The algorithm that has all options of the others.
MOST_OPTIONS = "train.py --optimizer normuon"
# Print the --help of each command, in one process: the imports are the time.
HELP = """
import contextlib, io, json, os, runpy, sys
texts = {}
for command in json.loads(sys.argv[1]):
    script, *words = command.split()
    module = script == "-m" and words.pop(0)
    sys.argv = [module or script, *words, "--help"]
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            if module:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            else:
                sys.path[0] = os.path.dirname(os.path.abspath(script))
                runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            assert not end.code, (command, end.code)
    texts[command] = out.getvalue()
json.dump(texts, sys.stdout)
"""


def options(text):
    """Options such as --max-steps, outside of quotes."""
    return {
        *re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*[a-z0-9](?!\w)", re.sub(r'"[^"]*"', "", text))
    }


def test_the_options_that_the_pages_name_exist():
    """Those of a command in its own --help, and an option by itself in the help of any command."""
    texts = {page: read(page).replace("\\\n", " ") for page in PAGES}
    used = [(page, *found) for page, text in texts.items() for found in COMMAND.findall(text)]
    commands = sorted({command for _, command, _ in used})
    assert {"train.py", "-m gptjax.data text", "-m gptjax.bench step"} <= {*commands}
    shown = python("-c", HELP, json.dumps([*commands, MOST_OPTIONS]), cwd=ROOT, COLUMNS="200")
    known = {command: options(text) for command, text in json.loads(shown).items()}
    assert all("--help" in names for names in known.values())
    known["train.py"] |= known[MOST_OPTIONS]
    wrong = [
        f"{page.relative_to(ROOT)}: python {command} {name}"
        for page, command, rest in used
        for name in sorted(options(rest) - known[command] - OTHERS)
    ]
    everywhere = set.union(*known.values(), OTHERS)
    for page, text in texts.items():
        quoted = options(" ".join(re.findall(r"`([^`\n]+)`", COMMAND.sub("", text))))
        wrong += [f"{page.relative_to(ROOT)}: {name}" for name in sorted(quoted - everywhere)]
    assert wrong == []


def train_commands():
    """The arguments of every train.py command with a config of the repository, without doubles."""
    found = set()
    for page in PAGES:
        text = read(page).replace("\\\n", " ")
        found |= {*re.findall(r"python train\.py (--config (?:configs|examples)/[^`#\n|&]*)", text)}
    return sorted(
        arguments.strip()
        for arguments in found
        if not re.search(rf"…|\[|{PLACEHOLDER}", re.sub(r"'.*'", "", arguments))
    )


def test_the_values_of_train_commands_are_accepted(monkeypatch):
    """Parsed as train.py does: paths of configs, names and values of options, and their checks."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(ROOT)
    commands = train_commands()
    assert len(commands) >= 10
    for arguments in commands:
        assert cli.from_command_line(shlex.split(arguments)).max_steps > 0


def test_the_markers_that_the_pages_name_exist(pytestconfig):
    named = {
        name for page in PAGES for name in re.findall(r"pytest (?:\S+ )*?-m (\w+)", read(page))
    }
    assert {"gpu", "quick"} <= named
    assert named <= {line.split(":")[0] for line in pytestconfig.getini("markers")}


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
    text, config = path.read_text(encoding="utf-8"), cli.load(path)
    tokens = Timeline(config).tokens(config.max_steps)
    if shards := re.search(r"--shards (\d+)", text):
        needed = min(103, -(-tokens // 100_000_000))
        cut = any(stage.max_document_length for stage in config.stages)  # these need more
        assert int(shards[1]) >= needed if cut else int(shards[1]) == needed
    if speed := re.search(
        r"([\d.]+) hours on one H200, at the ([\d,]+) tokens/s of (docs/\w+\.md)", text
    ):
        hours = tokens / int(speed[2].replace(",", "")) / 3600
        assert float(speed[1]) == pytest.approx(hours, rel=0.03)
        assert f"**{speed[2]}**" in read(
            ROOT / speed[3]
        )  # the newest figure, which is the bold one
