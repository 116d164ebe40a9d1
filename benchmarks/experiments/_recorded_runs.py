"""Training runs that are recorded in a file, so that a command that was stopped continues.

A finished run is a line of OUT/runs.jsonl with its settings. A run with the settings of a line is
not trained again.
"""

import functools
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from gptjax import config as configuration
from gptjax import data, devices, parallel
from gptjax.bench import results
from gptjax.config import Config

STARTED = time.perf_counter()


class OutOfTime(Exception):
    """The next run might not end within the limit."""


def elapsed_s() -> int:
    """Return the seconds since the start of the command."""
    return round(time.perf_counter() - STARTED)


def finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None


class RecordedRuns:
    """Runs that are trained once and recorded in OUT/runs.jsonl.

    A subclass defines `train` and `outcome`.

    Args:
        o: the command's options, with out, dataset, data_dir, device, val_tokens and limit_s.

    Attributes:
        made: records of the runs that this command asked for.
    """

    def __init__(self, o: Any):
        self.o, self.file, self.longest = o, o.out / "runs.jsonl", 0.0
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.known = [json.loads(line) for line in lines]
        self.made: list[dict] = []
        self.dataset = data.find_dataset(o.dataset, o.data_dir)

    def train(self, config: Config, label: str) -> dict:
        """Train a run; return its record without the settings."""
        raise NotImplementedError

    def outcome(self, record: dict) -> str:
        """Return how a run ended, in words."""
        raise NotImplementedError

    def settings(self, config: Config) -> dict:
        """Return the values that make a run another run; not its name or speed."""
        raise NotImplementedError

    def __call__(self, config: Config, label: str) -> dict:
        """Return the record of a run; train it if there is none.

        Raises:
            OutOfTime: it might not end within the limit.
        """
        record, settings = self.recorded(config), self.settings(config)
        if record is None:
            elapsed = time.perf_counter() - STARTED
            if elapsed + 1.1 * self.longest > self.o.limit_s:
                raise OutOfTime
            record = {"settings": settings} | self.train(config, label)
            self.longest = max(self.longest, time.perf_counter() - STARTED - elapsed)
            self.known.append(record)
            with self.file.open("a") as file:
                file.write(json.dumps(record, allow_nan=False) + "\n")
        if record not in self.made:
            self.made.append(record)
            print(
                f"{label}: {self.outcome(record)}, {record['ms']} ms a step, at {elapsed_s()} s",
                flush=True,
            )
        return record

    def recorded(self, config: Config) -> dict | None:
        """Return the record of a run; None if there is none."""
        settings = self.settings(config)
        # A record that is older than an option had the option's default.
        defaults = configuration.defaults(config)

        def matches(record: dict) -> bool:
            recorded = defaults | record["settings"]
            return all(recorded.get(name) == value for name, value in settings.items())

        return next((record for record in self.known if matches(record)), None)

    def data_settings(self) -> dict:
        """Return the part of the dataset's fingerprint that belongs to a run's settings."""
        fingerprint = self.dataset.fingerprint()
        return {key: fingerprint[key] for key in ("tokenizer", "train", "val")}

    def loader(self, config: Config) -> data.Loader:
        """Return the training batches of the config's seed."""
        return data.Loader(
            self.dataset.train,
            sequence_length=config.sequence_length,
            batch=config.batch,
            seed=config.seed,
            vocab_size=config.model.vocab_size,
        )

    def windows_of_val(self, config: Config, mesh: jax.sharding.Mesh) -> list[jax.Array]:
        """Return the windows of a validation on the device; they are the same for every seed."""
        windows = data.fixed_batches(
            self.dataset.val,
            sequence_length=config.sequence_length,
            batch=config.micro_batch,
            count=math.ceil(self.o.val_tokens / (config.micro_batch * config.sequence_length)),
            vocab_size=config.model.vocab_size,
        )
        return [parallel.put(parallel.over_batch(mesh, axis=0), w) for w in windows]

    @functools.cached_property
    def device(self) -> list[jax.Device]:
        return devices.select(self.o.device)[0][:1]

    def say_out_of_time(self) -> None:
        print(
            f"stopped at {elapsed_s()} s: {len(self.made)} runs are in {self.file}; the same "
            "command continues"
        )

    def write(self, path: Path, script: str, argv: Sequence[str] | None, **fields: Any) -> None:
        """Write the result of the command: its options, the fields, and the records as rows.

        Date and versions are those of the last recorded run.

        Args:
            script: name of the file in this folder.
            argv: the command's arguments; those of this process if None.
        """
        options = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(self.o).items()
            if name != "limit_s"
        }
        result = results.new(
            results.command(f"benchmarks/experiments/{script}", argv),
            self.made,
            device=", ".join(sorted({record["device"] for record in self.made})),
            options=options,
            **fields,
        )
        result |= {
            "date": max(record["date"] for record in self.made),
            "versions": self.made[-1]["versions"],
            "commit": self.made[-1].get("commit"),
        }
        results.write(path, result)


def of_this_run(mesh: jax.sharding.Mesh) -> dict:
    """Return the fields of a record that say when, where and with what a run was trained."""
    now = results.new("", [], device=mesh.devices.item().device_kind)
    return {name: now[name] for name in ("date", "device", "versions", "commit")}
