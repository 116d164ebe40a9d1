"""Optimizers by name."""

import dataclasses

from gptjax.optim.adamw import OptimizerConfig
from gptjax.optim.muon import MuonConfig
from gptjax.optim.normuon import NorMuonConfig

ALGORITHMS: dict[str, type[OptimizerConfig]] = {
    "adamw": OptimizerConfig,
    "normuon": NorMuonConfig,
    "muon": MuonConfig,
}


def switch_algorithm(config: OptimizerConfig, name: str) -> OptimizerConfig:
    """Return the config of another algorithm; options of both algorithms keep their values.

    Raises:
        ValueError: an unknown name (the message lists them).
    """
    if name == config.name:
        return config
    if name not in ALGORITHMS:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {list(ALGORITHMS)}")
    options = {field.name for field in dataclasses.fields(ALGORITHMS[name])}
    kept = {option: value for option, value in vars(config).items() if option in options}
    return ALGORITHMS[name](**kept)
