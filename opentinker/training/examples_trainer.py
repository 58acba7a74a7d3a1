"""Training on examples from the user's own process: supervised, and on preferences."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.client.client import Job
from opentinker.client.messages import AdamParams
from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import PreferenceJobConfig, SFTJobConfig
from opentinker.config.preference import (
    BradleyTerryConfig,
    DPOConfig,
    PreferenceEvaluationConfig,
    PreferenceLoss,
)
from opentinker.config.sft import SFTEvaluationConfig
from opentinker.config.tasks import TasksConfig
from opentinker.errors import ConfigError
from opentinker.rendering.supervised import LossOn
from opentinker.training.own_run import Resume
from opentinker.training.own_trainer import OwnTrainer, hosted_fields
from opentinker.training.preference import PreferenceLoop
from opentinker.training.preference_report import render_preference_report, summarize_preference
from opentinker.training.sft import SFTLoop
from opentinker.training.sft_report import render_sft_report, summarize_sft
from opentinker.training.sinks.own import AskedSinks, parse_sinks

Examples = Sequence[Mapping[str, Any]] | str | TasksConfig
"""Rows, or the name of a file or dataset."""


class SFTTrainer(OwnTrainer[SFTLoop]):
    """Fine-tunes the policy of an interactive job on conversations.

    `train` and `held_out` are rows (see docs/sft.md), or the name of a file or dataset. Metrics and report.html go to `run_dir`
    (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        train: Examples,
        held_out: Examples | None = None,
        *,
        loss_on: LossOn = "assistant",
        batch_size: int = 16,
        optimizer: AdamParams | None = None,
        evaluation: SFTEvaluationConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """A checkpoint is written every `save_every` steps, 0: none. `resume` is as `RLTrainer`'s.

        Raises: ConfigError; with `resume` also CheckpointError, ConflictError.
        """
        self._rows, named = _examples(train, held_out)
        self._sft_config = parse_config(
            SFTJobConfig,
            hosted_fields(job)
            | {
                "data": {**named, "loss_on": loss_on},
                "evaluation": evaluation or SFTEvaluationConfig(),
                "training": _training(seed, batch_size, optimizer, save_every),
                "sinks": parse_sinks(sinks),
            },
        )
        super().__init__(
            job,
            self._sft_config,
            run_dir=run_dir,
            resume=resume,
            given=self._rows,
            progress=progress,
            summarize=summarize_sft,
            render=render_sft_report,
        )

    async def _connect(self, policy: PolicyClient) -> SFTLoop:
        return await SFTLoop.connect(self._sft_config, policy, self._recorder, rows=self._rows)


class PreferenceTrainer(OwnTrainer[PreferenceLoop]):
    """Trains the policy of an interactive job on pairs of answers: `loss` is `DPO()`, `IPO()`, or, for a job with head
    'scalar', `BradleyTerry()`. What it is compared with is the policy as it is when training begins.

    `train` and `held_out` are rows (see docs/preference.md), or the name of a file or dataset. Metrics and report.html go to
    `run_dir` (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        train: Examples,
        held_out: Examples | None = None,
        *,
        loss: PreferenceLoss | None = None,
        batch_size: int = 16,
        optimizer: AdamParams | None = None,
        evaluation: PreferenceEvaluationConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """A checkpoint is written every `save_every` steps, 0: none. `resume` is as `RLTrainer`'s.

        Raises: ConfigError; with `resume` also CheckpointError, ConflictError.
        """
        loss = loss or DPOConfig()
        head = "scalar" if isinstance(loss, BradleyTerryConfig) else "lm"
        hosted = hosted_fields(job)
        if (mine := getattr(job.config, "head", head)) != head:
            raise ConfigError(
                f"the loss '{loss.kind}' trains a policy with head '{head}', this job's has head '{mine}'",
                hint=f"create_job(..., head='{head}')",
            )
        self._rows, named = _examples(train, held_out)
        self._preference_config = parse_config(
            PreferenceJobConfig,
            hosted
            | {
                "data": named,
                "loss": loss,
                "evaluation": evaluation or PreferenceEvaluationConfig(),
                "training": _training(seed, batch_size, optimizer, save_every),
                "sinks": parse_sinks(sinks),
            },
        )
        super().__init__(
            job,
            self._preference_config,
            run_dir=run_dir,
            resume=resume,
            given=self._rows,
            progress=progress,
            summarize=summarize_preference,
            render=render_preference_report,
        )

    async def _connect(self, policy: PolicyClient) -> PreferenceLoop:
        return await PreferenceLoop.connect(self._preference_config, policy, self._recorder, rows=self._rows, ends=False)


def _training(seed: int, batch_size: int, optimizer: AdamParams | None, save_every: int) -> dict[str, Any]:
    """Without an optimizer it is the kind of job's own."""
    fields = {"seed": seed, "batch_size": batch_size, "decay": "none", "save_every": save_every}
    return fields if optimizer is None else fields | {"optimizer": optimizer}


def _examples(
    train: Examples, held_out: Examples | None
) -> tuple[dict[str, Sequence[Mapping[str, Any]]], dict[str, TasksConfig]]:
    """(the rows that were given, the config's fields), by `train` and `held_out`."""
    given = {name: rows for name, rows in {"train": train, "held_out": held_out}.items() if rows is not None}
    rows = {name: rows for name, rows in given.items() if not isinstance(rows, str | TasksConfig)}
    return rows, {name: _tasks(rows) for name, rows in given.items()}


def _tasks(rows: Examples) -> TasksConfig:
    if isinstance(rows, TasksConfig):
        return rows
    return TasksConfig(name=rows if isinstance(rows, str) else "given rows")
