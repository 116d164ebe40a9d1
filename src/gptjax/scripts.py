"""train.py and configs/: in the root of the repository, or in the wheel, which contains a copy."""

from pathlib import Path

_PACKAGE = Path(__file__).parent
# The wheel's copy. An editable install has none: it reads the repository's files.
FOLDER = packed if (packed := _PACKAGE / "packed").is_dir() else _PACKAGE.parents[1]


def config_names() -> list[str]:
    """Return the names of the configs of gptjax."""
    return sorted(path.stem for path in (FOLDER / "configs").glob("*.py"))


def config_file(path: Path) -> Path:
    """Return the file of a config of gptjax, given its name, such as gpt2_tiny; else `path`."""
    known = str(path) in config_names()
    return FOLDER / "configs" / f"{path}.py" if known and not path.exists() else path
