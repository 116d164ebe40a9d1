"""Log of a run on Weights & Biases (the extra `wandb`)."""

import importlib.util
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def is_installed() -> bool:
    """Return whether the package wandb is installed.

    Python finds a folder `wandb`, which wandb itself writes, as a package without an origin.
    """
    spec = importlib.util.find_spec("wandb")
    return spec is not None and spec.origin is not None


class WandbLog:
    """Writer of a run on Weights & Biases. After the first error, the writer stops with a note.

    The run's id is kept in the file `wandb_id` of the run's folder: a resumed run continues the
    same run on Weights & Biases. Steps that are repeated after a resume appear twice.

    Args:
        run_dir: the run's folder; its name is the name of the run.
        project: the project of the run.
        note: called with a sentence if writing has failed.
    """

    def __init__(self, run_dir: Path, project: str, note: Callable[[str], object]):
        self._note = note
        self._run: Any = None

        def start():
            import wandb

            self._run = wandb.init(
                project=project,
                name=run_dir.name,
                id=_run_id(run_dir),
                resume="allow",
                dir=run_dir,
                # Otherwise wandb replaces the process's stdout, which the status line needs.
                settings=wandb.Settings(console="off"),
            )
            self._run.define_metric("*", step_metric="step")

        self._guard(start)

    def write(self, kind: str, step: int, tokens: int, fields: Mapping[str, Any]) -> None:
        """Write each number or text as `kind/name`, without raising errors.

        The dictionary `config` of an event becomes the run's config.
        """
        values = {f"{kind}/{k}": v for k, v in fields.items() if isinstance(v, str | int | float)}
        config = fields.get("config")
        if self._run is not None and isinstance(config, dict):
            self._guard(lambda: self._run.config.update(config, allow_val_change=True))
        if self._run is not None and values:
            self._guard(lambda: self._run.log({"step": step, "tokens": tokens, **values}))

    def close(self) -> None:
        """Finish the run without raising errors. Wait until wandb has sent its data."""
        if self._run is not None:
            self._guard(self._run.finish)
            self._run = None

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # errors of wandb, of the network, of the disk
            self._run = None
            text = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._note(f"Weights & Biases is no longer written: {text}; log.jsonl is still written")


def _run_id(run_dir: Path) -> str:
    file = run_dir / "wandb_id"
    if not file.exists():
        file.write_text(secrets.token_hex(8) + "\n")
    return file.read_text().strip()
