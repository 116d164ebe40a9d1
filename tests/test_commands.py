"""The command `gptjax`, `gptjax init`, and what the package says about itself."""

import re
import tomllib
from pathlib import Path

import pytest
from process_tools import python

import gptjax
from gptjax import __main__ as command
from gptjax import cli, init, scripts

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_command_lists_its_commands_without_a_heavy_import():
    code = (
        "import sys; from gptjax.__main__ import main; main()\n"
        "assert not {'numpy', 'jax', 'tyro'} & {*sys.modules}"
    )
    shown = python("-c", code)
    found = re.findall(r"^  (\w+) +\w", shown, re.M)
    assert {"train", "init", "data", "sample", "evaluate", "export", "doctor", "plot", "bench"} <= {
        *found
    }
    assert [name for name in command.COMMANDS if name in found] == found
    assert python("-m", "gptjax", "--version") == f"gptjax {gptjax.__version__}\n"


def test_an_unknown_command_names_a_similar_one(monkeypatch, capsys):
    for given, says in {"smaple": "did you mean sample?", "x": "gptjax --help lists"}.items():
        monkeypatch.setattr("sys.argv", ["gptjax", given])
        with pytest.raises(SystemExit, match="2"):
            command.main()
        assert says in capsys.readouterr().err


def test_init_writes_a_config_with_its_imports_and_overwrites_nothing(tmp_path, capsys):
    init.init(tmp_path / "own", config="gpt2_124m_normuon_docs")
    files = sorted(path.name for path in (tmp_path / "own").rglob("*.py"))
    used = ("gpt2_124m", "gpt2_124m_docs", "gpt2_124m_normuon", "gpt2_124m_normuon_docs")
    assert files == [*(f"{name}.py" for name in used), "train.py"]
    copy = tmp_path / "own" / "configs" / f"{used[-1]}.py"
    assert cli.load(copy) == cli.load(Path(used[-1]))
    assert (tmp_path / "own" / "train.py").read_bytes() == (ROOT / "train.py").read_bytes()
    assert f"cd {tmp_path}/own && python train.py --config configs/" in capsys.readouterr().out
    copy.write_text("mine")
    with pytest.raises(FileExistsError, match=r"gpt2_124m\.py exists, and is not overwritten"):
        init.init(tmp_path / "own", config="gpt2_124m_fp32")
    assert copy.read_text() == "mine" and not (copy.parent / "gpt2_124m_fp32.py").exists()
    with pytest.raises(ValueError, match="one of gpt2_124m, .*, got 'gpt3'"):
        init.init(tmp_path, config="gpt3")


def test_a_config_of_gptjax_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.load(Path("gpt2_tiny")) == cli.load(ROOT / "configs" / "gpt2_tiny.py")
    with pytest.raises(cli.ConfigError, match=r"got gpt2_tny; configs of gptjax: gpt2_124m, "):
        cli.load(Path("gpt2_tny"))
    assert scripts.config_names() == sorted(path.stem for path in ROOT.glob("configs/*.py"))


def test_the_version_has_one_source():
    assert "version" in PROJECT["project"]["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {gptjax.__version__}\n" in citation


def test_the_readme_of_an_index_page_has_no_link_into_the_repository():
    hook = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = r"\]\((?!https?:)"
    assert re.search(links, text)
    for each in hook["substitutions"]:
        text = re.sub(each["pattern"], each["replacement"], text)
    assert not re.search(links, text) and "\n## Train\n" in text
