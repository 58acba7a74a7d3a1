"""The algorithm that a config names, as a function of a batch's rewards."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from opentinker.algorithms.credit import episode_return, returns_to_go
from opentinker.algorithms.grpo import group_advantages
from opentinker.algorithms.rloo import leave_one_out, leave_one_out_turns
from opentinker.algorithms.types import AdvantageFn, Batch, ShapeError, checked
from opentinker.client.messages import FloatArray
from opentinker.config.algorithms import (
    AlgorithmConfig,
    CustomConfig,
    DrGRPOConfig,
    GRPOConfig,
    PPOConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from opentinker.env.load import load_function
from opentinker.errors import ConfigError

Compare = Callable[[npt.NDArray[np.float64]], FloatArray]
"""Values that are compared with each other, float64[N] -> their advantages, float32[N]."""


def advantage_function(config: AlgorithmConfig, base_dir: Path | None = None) -> AdvantageFn:
    """What turns rewards into advantages. A function of the user's own is looked for from `base_dir`.

    Raises:
        EnvironmentLoadError: the user's function cannot be loaded.
        ConfigError: it takes a critic's values, and not rewards alone.
    """
    if isinstance(config, PPOConfig):
        raise ConfigError("algorithm.kind 'ppo': its advantages are made of a critic's values, see opentinker.training.ppo")
    if isinstance(config, CustomConfig):
        return user_advantages(load_function(config.function, base_dir), f"algorithm.function {config.function}")

    def advantages(batch: Batch) -> list[list[FloatArray]]:
        if isinstance(config, ReinforcePPConfig):
            return _over_batch(batch, config)
        return [_compared(group, config, _comparison(config)) for group in batch]

    return advantages


def _comparison(config: AlgorithmConfig) -> Compare:
    match config:
        case RLOOConfig():
            return leave_one_out
        case DrGRPOConfig():
            return lambda values: group_advantages(values, normalize_std=False)
        case GRPOConfig(normalize_std=False):
            return lambda values: group_advantages(values, normalize_std=False)
        case _:
            return group_advantages


def _compared(group: Sequence[FloatArray], config: AlgorithmConfig, compare: Compare) -> list[FloatArray]:
    """Each episode counts once, or with credit 'turn' each turn."""
    if config.credit == "episode":
        scores = compare(np.array([np.sum(rewards, dtype=np.float64) for rewards in group]))
        return [np.full(np.shape(rewards), score, np.float32) for rewards, score in zip(group, scores, strict=True)]
    returns = [returns_to_go(rewards, config.discount) for rewards in group]
    if isinstance(config, RLOOConfig):
        return leave_one_out_turns(returns)
    flat = compare(np.concatenate(returns)) if returns else np.zeros(0, np.float32)
    return np.split(flat, np.cumsum([len(r) for r in returns])[:-1]) if returns else []


def _over_batch(batch: Batch, config: ReinforcePPConfig) -> list[list[FloatArray]]:
    """Normalised over all turns of the batch (Hu et al., 2025, "REINFORCE++", eq. 10; with `group_baseline`, section 3.3)."""
    returns = [
        [returns_to_go(r, config.discount) if config.credit == "turn" else episode_return(r) for r in group] for group in batch
    ]
    if config.group_baseline:
        for group in returns:
            if group:
                # Every episode counts once, however many turns it has.
                mean = float(np.mean([r.mean() for r in group if len(r)] or np.zeros(1)))
                group[:] = [r - mean for r in group]
    every = np.concatenate([r for group in returns for r in group] or [np.zeros(0)])
    flat = group_advantages(every)
    split = np.split(flat, np.cumsum([len(r) for group in returns for r in group])[:-1]) if len(every) else []
    parts = iter(split)
    return [[next(parts) if len(every) else np.zeros(len(r), np.float32) for r in group] for group in returns]


def user_advantages(function: Callable[[Batch], object], what: str) -> AdvantageFn:
    """A function of the user's, whose answers are checked.

    Raises:
        ConfigError: from the function, when it raises or gives something malformed.
    """

    def advantages(batch: Batch) -> list[list[FloatArray]]:
        try:
            return checked(function(batch), batch, what)
        except Exception as error:
            text = str(error) if isinstance(error, ShapeError) else f"{what} raised {type(error).__name__}: {error}"
            raise ConfigError(text) from error

    return advantages
