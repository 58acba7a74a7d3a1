"""The configs of a reinforcement-learning run: its steps, its evaluations, and when it stops."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from opentinker.client.messages import AdamParams
from opentinker.config.base import Config, Count


class EvaluationConfig(Config):
    """Evaluation on held-out tasks with the same FSM as training."""

    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every this many steps; 0 = only at start and end."""
    max_tasks: Count = 64
    """Held-out tasks used, from the first."""
    samples_per_task: Count = 8
    """Episodes per held-out task."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits, in sampling and in the loss alike."""
    pass_at: tuple[Count, ...] = ()
    """Report pass@k for these k: the chance that one of k episodes of a task is exact (reports `exact` of 1, or without that
    metric earns 1 or more), estimated from `samples_per_task` without bias (Chen et al., 2021, eq. 1)."""
    metric: str = ""
    """What `keep_best` and `training.stop` look at: `reward`, `exact`, `pass@4`, or a metric that the environment reports.
    Empty = `exact` where the environment reports it, else `reward`."""
    agent: str = ""
    """With `agents`: by whose score `keep_best` and `training.stop` go. Empty = the mean over those who learn, which in a game
    that one wins and another loses says nothing: name one there."""
    keep_best: bool = False
    """Save the checkpoint `best` whenever an evaluation is better than all before it; with `agents`, of all policies."""

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationConfig":
        if self.pass_at and max(self.pass_at) > self.samples_per_task:
            raise ValueError(
                f"pass_at {max(self.pass_at)} needs samples_per_task of at least that, not {self.samples_per_task}"
            )
        if self.metric.startswith("pass@") and self.metric not in [f"pass@{k}" for k in self.pass_at]:
            raise ValueError(f"metric {self.metric} needs {self.metric.removeprefix('pass@')} in pass_at")
        return self


class StopConfig(Config):
    """When a run has learnt all it will, or breaks. It is saved first, as checkpoint `stopped-early`."""

    plateau: Count | None = None
    """End after this many scores in a row without a new best."""
    falls: Count | None = None
    """Act after this many scores in a row, each worse than the one before."""
    score: Literal["evaluation", "training"] = "evaluation"
    """What `plateau` and `falls` count: 'evaluation', each evaluation's `evaluation.metric`; 'training', for runs without
    held-out tasks or with few evaluations, the mean reward of each `window` of training steps."""
    window: Annotated[int, Field(ge=2)] = 10
    """With score 'training': steps that make one score. Steps draw different tasks, so rewards that do not change at all fall
    three times in a row by chance once in 24, and so do means. Hence a window counts as a fall only where it is below the one
    before by more than the standard error of their difference, as the steps of both tell it: three in a row are then chance 3
    times in 100,000 (windows of 10). The cost: a collapse is heard of `falls` to `falls` + 1 windows after it began (30 to 40
    steps), and a decline that is below a tenth of a step's noise each step is often missed, and left to `plateau`."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Act when a step's gradient norm, before clipping, is larger."""
    max_mismatch_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Act when engine and trainer are further apart."""
    max_reference_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Act when the policy is further from its reference; needs algorithm.kl with a coefficient, or with `measure`."""
    action: Literal["stop", "reduce"] = "stop"
    """'stop' ends the run, COMPLETED; 'reduce' multiplies the learning rate with `factor`, and stops at the third time."""
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Of action 'reduce'."""

    @property
    def counted(self) -> str:
        """The field that counts scores; empty where there is none."""
        return "plateau" if self.plateau else "falls" if self.falls else ""

    @model_validator(mode="after")
    def _score_is_counted(self) -> "StopConfig":
        if self.score == "training" and not self.counted:
            raise ValueError("score 'training' is what plateau and falls count: set one of them, or leave score out")
        return self


class RLTrainingConfig(Config):
    """The driver loop."""

    steps: Count = 100
    """Rollout-and-update steps."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Tasks, samples and adapter initialisation derive from it."""
    optimizer: AdamParams = AdamParams()
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps."""
    decay: Literal["none", "linear"] = "none"
    """'linear' lets the learning rate fall after the warm-up, to reach 0 one step after the last; steadier endings."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint every this many steps; the last step is always saved under 'final'."""
    keep_last: Count | None = None
    """Keep this many of the newest periodic checkpoints, and of those called 'best' the best one; delete those before, but none
    that has a tag or that a job started from. None = keep all."""
    stop: StopConfig = StopConfig()
    transcripts_per_step: Annotated[int, Field(ge=0)] = 2
    """Sample episodes written to the run's transcripts."""
