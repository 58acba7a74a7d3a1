"""The synchronous face, on a job whose policy lives in memory."""

import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import yaml

import opentinker as ot
from opentinker.client.sync import SyncRunner
from opentinker.config.base import parse_config
from opentinker.config.job import InteractiveJobConfig
from opentinker.errors import CheckpointError, ConfigError, EnvironmentLoadError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Simultaneous
from opentinker.training.recorder import standing_rows
from opentinker.training.rl import RLLoop
from opentinker.training.sinks import select


class MemoryJob:
    """As much of a `Job` as a trainer uses."""

    def __init__(self, policy: Any, number: int = 1) -> None:
        self.id = f"job-{number}"
        self.record = {"owner": "ann"}
        self.named: list[str] = []
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self.config = InteractiveJobConfig(base_model="bandit", lora=ot.LoraConfig(rank=4), seed=5)
        self.sync = SyncRunner()
        self._policy = policy

    def name_checkpoints(self, addresses: Sequence[str]) -> list[str]:
        self.named += addresses
        return list(addresses)

    def at_end(self, close: Callable[[], Awaitable[None]]) -> None:
        self.closers.append(close)

    def run(self, work: Callable[[Any], Awaitable[Any]]) -> Any:
        async def call() -> Any:
            return await work(self._policy)

        return self.sync.run(call())


@pytest.fixture
def job(policy) -> Iterator[MemoryJob]:
    job = MemoryJob(policy)
    yield job
    job.sync.close()


@pytest.fixture
def make_trainer(job, seven, tmp_path) -> Callable[..., ot.RLTrainer]:
    def make(**changes: Any) -> ot.RLTrainer:
        arguments = {
            "job": job,
            "environment": seven,
            "algorithm": ot.GRPO(group_size=8),
            "optimizer": ot.AdamParams(learning_rate=2.0),
            "sampling": ot.SamplingConfig(max_tokens=4),
            "rollout": ot.RolloutConfig(groups_per_step=8, max_turns=1),
            "run_dir": tmp_path / "run",
        }
        return ot.RLTrainer(**(arguments | changes))

    return make


def test_what_its_environments_left_running_ends_with_the_job(make_trainer, job, monkeypatch) -> None:
    closed = []

    async def close(loop: Any) -> None:
        closed.append(loop)

    monkeypatch.setattr(RLLoop, "close", close)
    trainer = make_trainer()
    trainer.fit(steps=1)
    trainer.fit(steps=1)
    (end,) = job.closers
    assert not closed
    job.sync.run(end())
    assert closed == [trainer._loop]


def test_fit_trains_reports_and_continues(make_trainer, tmp_path, capsys) -> None:
    trainer = make_trainer()
    first = trainer.fit(steps=4)
    second = trainer.fit(steps=8)
    assert (first["steps"], second["steps"]) == (4, 12)
    assert second["exact_after"] > second["exact_before"] + 0.3
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == second
    assert (tmp_path / "run" / "report.html").is_file()
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["environment"]["name"], config["lora"]["rank"]) == ("Seven", 4)
    printed = capsys.readouterr().out.splitlines()
    assert sum("step " in line for line in printed) == 12
    assert any("12/12" in line for line in printed)


def test_runs_go_to_a_folder_named_after_the_job(make_trainer, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_trainer(run_dir=None, progress=False).fit(1)
    assert (tmp_path / "runs" / "job-1" / "metrics.jsonl").is_file()


def test_evaluate_measures_without_training(make_trainer, policy) -> None:
    row = make_trainer(progress=False).evaluate()
    assert row is not None
    assert row["episodes"] == 48
    assert policy.calls == ["info"]


def test_ctrl_c_stops_training_and_leaves_a_report(make_trainer, seven, tmp_path) -> None:
    class Impatient(seven):
        @classmethod
        def make_task(cls, seed: int) -> Any:
            if (tmp_path / "run" / "metrics.jsonl").read_text().count('"step"') > 4:
                raise KeyboardInterrupt
            return super().make_task(seed)

    with pytest.raises(KeyboardInterrupt):
        make_trainer(environment=Impatient, progress=False).fit(50)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] >= 1
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_run_ends_early_and_is_saved_as_it_was_told_to(make_trainer, policy) -> None:
    trainer = make_trainer(
        optimizer=ot.AdamParams(learning_rate=0.0),
        evaluation=ot.EvaluationConfig(every=1, metric="reward"),
        stop=ot.StopConfig(plateau=2),
        save_every=1,
        progress=False,
    )
    summary = trainer.fit(steps=30)
    assert "has not risen above" in summary["stopped"]
    assert summary["steps"] < 30
    assert policy.calls.count("save stopped-early") == 1
    assert sum(call.startswith("save step-") for call in policy.calls) == summary["steps"]


async def test_fit_works_where_a_loop_already_runs(make_trainer) -> None:
    assert make_trainer(progress=False).fit(2)["steps"] == 2


def test_a_class_that_is_no_environment_is_refused_at_once(make_trainer) -> None:
    class Half(ot.Environment):
        def reset(self, task: Any) -> str:
            return "?"

    with pytest.raises(EnvironmentLoadError, match="Half defines no step"):
        make_trainer(environment=Half)
    with pytest.raises(EnvironmentLoadError):
        make_trainer(environment="no_such_environment")


def test_arguments_that_the_environment_does_not_take_are_refused_at_once(make_trainer, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"environment.args: Seven does not take them: .*'sise'"):
        make_trainer(environment_args={"sise": 3})
    assert not (tmp_path / "run").exists()


def test_ppo_needs_the_critic_that_it_was_configured_for(make_trainer, job) -> None:
    ppo = ot.PPO(group_size=8, critic=ot.CriticConfig(rank=4, alpha=8.0))
    with pytest.raises(ConfigError, match="needs a critic of rank 4 and alpha 8") as caught:
        make_trainer(algorithm=ppo)
    assert "create_job(..., critic=LoraConfig(rank=4, alpha=8))" in caught.value.hint
    job.config = job.config.model_copy(update={"critic": ot.LoraConfig(rank=4, alpha=8.0)})
    assert make_trainer(algorithm=ppo).fit(steps=2)["steps"] == 2


class Pair(MultiAgentEnvironment):
    agents = ("black", "white")
    protocol = Simultaneous()

    def reset(self, task: Any) -> dict[str, str]:
        return {"black": "a digit?", "white": "a digit?"}

    def step_together(self, actions: Any) -> MultiStepResult:
        return MultiStepResult({}, done=True)


def test_ppo_on_a_further_server_needs_the_critic_there(job, tmp_path) -> None:
    ppo = ot.PPO(group_size=4, critic=ot.CriticConfig(rank=4, alpha=8.0))
    agents = {"black": ot.AgentConfig(), "white": ot.AgentConfig(server="second", algorithm=ppo)}

    def make(critic: ot.LoraConfig | None, own: ot.LoraConfig | None = None) -> ot.MultiAgentTrainer:
        fields = {"base_model": "bandit", "lora": {"rank": 4}, "servers": {"second": {"critic": critic}}, "critic": own}
        job.config = parse_config(InteractiveJobConfig, fields)
        return ot.MultiAgentTrainer(job, Pair, agents, ot.GRPO(group_size=4), progress=False, run_dir=tmp_path / "run")

    right = ot.LoraConfig(rank=4, alpha=8.0)
    for critic, own in ((None, None), (None, right), (ot.LoraConfig(rank=8, alpha=8.0), None)):
        with pytest.raises(ConfigError, match=r"needs a critic of rank 4 .* that server 'second' began with") as caught:
            make(critic, own)
        assert 'create_job(..., servers={"second": {"critic": LoraConfig(rank=4, alpha=8)}})' in caught.value.hint
    make(right)


def test_a_run_in_a_users_process_tells_its_sinks_piece_by_piece_as_one_run(make_trainer, tmp_path, monkeypatch) -> None:
    opened: list[tuple[str, bool]] = []
    told: list[tuple[int, set[str]]] = []

    class Told:
        def __init__(self, config: Any, run: Any) -> None:
            opened.append((run.id, run.resumed))
            assert config.project == "p"

        def log(self, step: int, values: Any) -> None:
            told.append((step, {name.partition("/")[0] for name in values}))

        def close(self) -> None:
            opened.append(("closed", True))

    monkeypatch.setitem(select._OPEN, "wandb", Told)
    monkeypatch.setattr(select, "find_spec", lambda package: package)
    trainer = make_trainer(progress=False, sinks=[{"kind": "wandb", "project": "p"}])
    trainer.fit(2)
    seen = len(told)
    assert opened[1:] == [("closed", True)], "what a sink holds does not outlive the call"
    trainer.evaluate()
    trainer.fit(1)
    assert [each[0] for each in opened].count(opened[0][0]) == len(opened) // 2, "it is one run there"
    assert not opened[0][1]
    assert seen > 0
    assert sorted(step for step, kinds in told if kinds == {"train"}) == [1, 2, 3]
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert config["sinks"][0]["kind"] == "wandb"


def test_a_sink_that_is_not_known_or_not_installed_is_refused_before_anything_runs(make_trainer, tmp_path, monkeypatch) -> None:
    with pytest.raises(ConfigError, match="sinks"):
        make_trainer(sinks=["wandbee"])
    monkeypatch.setattr(select, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match="'tensorboard' needs the package tensorboard"):
        make_trainer(sinks=["tensorboard"])
    assert not (tmp_path / "run").exists()


class Killed(BaseException):
    """Nothing in a driver tidies up after it, as after SIGKILL."""


@pytest.fixture
def cut(make_trainer, seven, policy, tmp_path) -> Callable[..., Any]:
    """Begins a run of 7 steps that dies within the `dies`-th; what was it given besides."""

    class Mortal(seven):
        deadline = 0

        @classmethod
        def make_task(cls, seed: int) -> Any:
            if policy.version >= Mortal.deadline:
                raise Killed
            return super().make_task(seed)

    Mortal.__name__ = "Seven"

    def begin(dies: int, **changes: Any) -> ot.RLTrainer:
        Mortal.deadline = dies - 1
        trainer = make_trainer(environment=Mortal, progress=False, **changes)
        with pytest.raises(Killed):
            trainer.fit(7)
        return trainer

    return begin


def steps_of(folder: Any) -> list[int]:
    return [row["step"] for row in standing_rows(map(json.loads, open(folder / "metrics.jsonl"))) if row["kind"] == "step"]


@pytest.mark.parametrize("resume", [True, "auto"])
def test_a_run_that_was_killed_goes_on_in_another_job_as_if_it_had_not_been(
    make_trainer, cut, policy, tmp_path, resume: Any
) -> None:
    make_trainer(run_dir=tmp_path / "whole", progress=False).fit(7)
    whole = policy.logits.copy()
    policy.__init__()
    cut(6, save_every=2)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5]
    policy.logits[:] = 9.0  # the new job's policy is another one
    next_job = MemoryJob(policy, 2)
    trainer = make_trainer(job=next_job, resume=resume, save_every=2, progress=False)
    assert next_job.named == ["ann/job-1/step-000004@4"]
    assert trainer.steps_done == 4
    assert trainer.fit(7)["steps"] == 7
    assert "load ann/job-1/step-000004@4" in policy.calls
    assert np.array_equal(policy.logits, whole)
    assert steps_of(tmp_path / "run") == [1, 2, 3, 4, 5, 6, 7]
    assert trainer.fit(1)["steps"] == 8, "from here on steps are further ones"
    next_job.sync.close()


def test_a_program_that_is_run_again_does_what_is_left_of_its_steps(make_trainer, cut, policy) -> None:
    cut(6, save_every=1)
    trainer = make_trainer(resume=True, save_every=1, progress=False)
    trained = policy.calls.count("train_step")
    assert trainer.fit(2)["steps"] == 5, "the program's first two steps were done before"
    assert policy.calls.count("train_step") == trained
    assert trainer.fit(3)["steps"] == 5
    assert trainer.fit(4)["steps"] == 9


def test_auto_begins_where_nothing_was_saved_and_true_does_not(make_trainer, cut, policy, tmp_path) -> None:
    cut(2, save_every=3)
    with pytest.raises(ConfigError, match="holds a run without a checkpoint"):
        make_trainer(resume=True, save_every=3)
    policy.__init__()
    trainer = make_trainer(resume="auto", save_every=3, progress=False)
    assert trainer.fit(3)["steps"] == 3
    assert steps_of(tmp_path / "run") == [1, 2, 3]
    assert make_trainer(resume="auto", save_every=3, run_dir=tmp_path / "new", progress=False).fit(1)["steps"] == 1


def test_what_cannot_be_resumed_is_said_at_once(make_trainer, cut, job, tmp_path) -> None:
    with pytest.raises(ConfigError, match="which run is to go on") as caught:
        make_trainer(resume=True, run_dir=None)
    assert "run_dir=" in caught.value.hint
    with pytest.raises(ConfigError, match="resume='never' is neither True nor False nor 'auto'"):
        make_trainer(resume="never", save_every=1)
    with pytest.raises(ConfigError, match="with save_every=0 there will be none"):
        make_trainer(resume="auto")
    cut(4, save_every=1)
    with pytest.raises(ConfigError, match="holds another run") as caught:
        make_trainer()
    assert "resume=True" in caught.value.hint
    with pytest.raises(ConfigError, match=r"^algorithm.group_size: the run in .* has 8, and now it is 4"):
        make_trainer(resume=True, algorithm=ot.GRPO(group_size=4))
    with pytest.raises(ConfigError, match=r"^train_tasks: the run in .* was given nothing to compare, and now it is 1 rows"):
        make_trainer(resume=True, train_tasks=[{"question": 1}])

    def gone(addresses: Sequence[str]) -> list[str]:
        raise ConfigError(f"checkpoints.0: job job-1 has no checkpoint '{addresses[0]}'", hint="it has none")

    rows = (tmp_path / "run" / "metrics.jsonl").read_text()
    job.name_checkpoints = gone
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match=r"cannot go on: .* has no checkpoint"):
            make_trainer(resume=resume, save_every=1)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == rows


def test_a_checkpoint_that_does_not_load_is_an_error_and_can_be_tried_again(make_trainer, cut, policy) -> None:
    cut(4, save_every=2)
    trainer = make_trainer(resume=True, progress=False)
    kept = policy.saved.pop("step-000002")
    for _ in range(2):
        with pytest.raises(KeyError):
            trainer.fit(7)
    policy.saved["step-000002"] = kept
    assert trainer.fit(7)["steps"] == 7


def test_a_checkpoint_that_is_corrupt_is_said_with_the_run_and_a_way_out(make_trainer, cut, policy, monkeypatch) -> None:
    async def load(name: str) -> Any:
        raise CheckpointError(f"{name} is corrupt")

    cut(4, save_every=2)
    monkeypatch.setattr(policy, "load", load)
    with pytest.raises(CheckpointError, match=r"the run in .* cannot go on: ann/job-1/step-000002@2 is corrupt") as caught:
        make_trainer(resume=True, progress=False).fit(7)
    assert "start_from" in caught.value.hint


def test_a_run_that_goes_on_is_the_same_run_to_its_sinks(make_trainer, cut, monkeypatch) -> None:
    opened: list[tuple[str, bool]] = []

    class Told:
        def __init__(self, config: Any, run: Any) -> None:
            opened.append((run.id, run.resumed))

        def log(self, step: int, values: Any) -> None:
            return

        def close(self) -> None:
            return

    monkeypatch.setitem(select._OPEN, "wandb", Told)
    monkeypatch.setattr(select, "find_spec", lambda package: package)
    sinks = [{"kind": "wandb", "project": "p"}]
    cut(4, save_every=2, sinks=sinks)
    make_trainer(resume=True, progress=False, sinks=sinks).fit(7)
    assert [resumed for _, resumed in opened] == [False, True]
    assert len({id_ for id_, _ in opened}) == 1
