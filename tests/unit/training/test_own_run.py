"""The folder of a run that a user's process drives: where it goes on, and what it refuses to go on from."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from opentinker.config.job import RLJobConfig, SFTJobConfig, parse_job
from opentinker.errors import CheckpointError, ConfigError, ConflictError
from opentinker.training import folder_lock
from opentinker.training.own_run import OwnRun, Resume, digests, policy_places, read_left
from opentinker.training.recorder import Recorder
from opentinker.training.same_run import differences


def sft(**changes: Any) -> dict[str, Any]:
    """The resolved config of a job; `changes` by dotted keys with "__" for "."."""
    fields: dict[str, Any] = {"kind": "sft", "base_model": "m", "data": {"train": {"name": "rows.jsonl"}}, "training": {}}
    for key, value in {"training__decay": "none", **changes}.items():
        *path, last = key.split("__")
        place = fields
        for part in path:
            place = place.setdefault(part, {})
        place[last] = value
    return parse_job(fields).model_dump(mode="json")


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """The folder of a run that was left after steps 2, 4 and 6 were saved."""
    folder = tmp_path / "run"
    run = OwnRun(folder, sft(), given={"train": "2 rows"})
    run.begin("ann", "job-0a")
    recorder = Recorder(folder, sft(), checkpoints=run)
    recorder.row({"kind": "sft_step", "step": 7})
    for step in (2, 4, 6):
        recorder.checkpoints.saved(step, {"": step + 1})
    return folder


def test_a_run_goes_on_from_the_last_checkpoint_that_its_folder_knows(left: Path) -> None:
    for resume in (True, "auto"):
        run = OwnRun(left, sft(), resume, {"train": "2 rows"})  # type: ignore[arg-type]
        assert (run.step, run.steps, run.resume_at) == (6, [6], 6)
        assert run.where(6) == "ann/job-0a/step-000006@7"
        assert run.addresses == ["ann/job-0a/step-000006@7"], "those before may have been deleted"


def test_from_job_to_job_each_checkpoint_keeps_the_address_of_the_job_that_wrote_it(left: Path) -> None:
    run = OwnRun(left, sft(), True, {"train": "2 rows"})
    run.begin("ann", "job-0b")
    assert OwnRun(left, sft(), True, {"train": "2 rows"}).step == 6, "nothing is forgotten before something new is whole"
    run.saved(8, {"": 9})
    assert OwnRun(left, sft(), True, {"train": "2 rows"}).addresses == ["ann/job-0b/step-000008@9"]


def test_drivers_that_meet_may_go_back_a_step_and_then_forget_the_later_one(tmp_path: Path) -> None:
    def apart(resume: Resume = True) -> OwnRun:
        return OwnRun(tmp_path, config, resume)

    meets = {"agents": {"black": {}}, "coordinator": {"run": "duel", "url": "http://x"}, "environment": {"name": "duel"}}
    config = parse_job({"kind": "rl", "base_model": "m", "lora": {}, **meets}).model_dump(mode="json")
    run = apart(False)
    run.begin("ann", "job-0a", {"black": None})
    Recorder(tmp_path, config, checkpoints=run)
    for step in (2, 4, 6):
        run.saved(step, {"black": step})
    assert apart().addresses == ["ann/job-0a/step-000004@4", "ann/job-0a/step-000006@6"]
    again = apart()
    again.begin("ann", "job-0b", {"black": None})
    again.saved(5, {"black": 9})
    assert apart().addresses == ["ann/job-0a/step-000004@4", "ann/job-0b/step-000005@9"]


def test_what_only_says_where_and_how_long_may_change(left: Path) -> None:
    changes = {
        "name": "other",
        "scheduling__priority": -1,
        "resources__gpus": 1,
        "engine__memory_fraction": 0.2,
        "trainer__memory_gb": 3.0,
        "training__steps": 500,
        "training__save_every": 9,
        "training__keep_last": 3,
        "sinks": ["tensorboard"],
    }
    for key, value in changes.items():
        assert OwnRun(left, sft(**{key: value}), True, {"train": "2 rows"}).step == 6


@pytest.mark.parametrize(
    ("change", "key", "before", "now"),
    [
        ({"training__seed": 4}, "training.seed", "0", "4"),
        ({"training__batch_size": 3}, "training.batch_size", "16", "3"),
        ({"base_model": "other"}, "base_model", "'m'", "'other'"),
        ({"lora": {"rank": 4}}, "lora", "None", r"\{'rank': 4"),
        ({"training__optimizer": {"learning_rate": 0.5}}, "training.optimizer.learning_rate", "", "0.5"),
        ({"data__loss_on": "all"}, "data.loss_on", "'assistant'", "'all'"),
        ({"evaluation__every": 5}, "evaluation.every", "0", "5"),
        ({"trainer__dtype": "float32"}, "trainer.dtype", "", "'float32'"),
        ({"start_from": "job-0c/final"}, "start_from", "''", "'job-0c/final'"),
    ],
)
def test_what_makes_it_another_run_is_refused_by_name_with_both_values(
    left: Path, change: dict[str, Any], key: str, before: str, now: str
) -> None:
    for resume in (True, "auto"):
        with pytest.raises(ConfigError, match=rf"^{key}: the run in .* has {before}.*, and now it is {now}") as caught:
            OwnRun(left, sft(**change), resume, {"train": "2 rows"})  # type: ignore[arg-type]
        assert "start_from" in caught.value.hint


def test_another_kind_of_run_and_other_rows_are_refused(left: Path) -> None:
    other = parse_job({"kind": "rl", "base_model": "m", "environment": {"name": "guess"}}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"^kind: the run in .* has 'sft', and now it is 'rl'"):
        OwnRun(left, other, True)
    with pytest.raises(ConfigError, match=r"^train: the run in .* was given 2 rows, and now it is 3 rows"):
        OwnRun(left, sft(), True, {"train": "3 rows"})


def test_a_learning_rate_that_falls_over_all_steps_needs_as_many(tmp_path: Path) -> None:
    falls, longer = sft(training__decay="linear"), sft(training__decay="linear", training__steps=7)
    [(where, before, now)] = differences(falls, longer)
    assert where == "training.steps (training.decay is 'linear', over all of them)"
    assert (before, now) == (100, 7)
    assert not list(differences(sft(), sft(training__steps=7)))


def test_fields_that_a_newer_release_added_do_not_make_it_another_run(left: Path) -> None:
    config = yaml.safe_load((left / "config.yaml").read_text())
    del config["trainer"]["memory_gb"], config["training"]["keep_last"], config["data"]["overlong"]
    (left / "config.yaml").write_text(yaml.safe_dump(config))
    assert OwnRun(left, sft(), True, {"train": "2 rows"}).step == 6


def test_a_folder_without_a_run_is_nothing_to_go_on_with_and_auto_begins(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run: there is nothing to go on from"):
        OwnRun(tmp_path / "no", sft(), True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="holds no run: there is nothing to go on from"):
        OwnRun(tmp_path / "file", sft(), True)
    begins = OwnRun(tmp_path / "no", sft(), "auto")
    assert (begins.step, begins.resume_at) == (None, None)


def test_a_run_without_a_checkpoint_begins_anew_only_when_that_is_asked_for(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, sft())
    run.begin("ann", "job-0a")
    Recorder(tmp_path, sft(), checkpoints=run).row({"kind": "sft_step", "step": 1})
    with pytest.raises(ConfigError, match="holds a run without a checkpoint") as caught:
        OwnRun(tmp_path, sft(), True)
    assert "save_every" in caught.value.hint
    anew = OwnRun(tmp_path, sft(), "auto")
    assert (anew.step, anew.resume_at) == (None, -1)
    with pytest.raises(ConfigError, match=r"^training.seed"):
        OwnRun(tmp_path, sft(training__seed=9), "auto")


def test_a_run_that_died_before_its_first_row_is_none(tmp_path: Path) -> None:
    OwnRun(tmp_path, sft(), "auto").begin("ann", "job-0a")  # and was killed before its config was there
    again = OwnRun(tmp_path, sft(), "auto")
    assert (again.step, again.resume_at) == (None, None)
    Recorder(tmp_path, sft())
    assert OwnRun(tmp_path, sft(training__seed=9), "auto").resume_at is None, "nothing came of the other config"
    with pytest.raises(ConfigError, match="holds no run"):
        OwnRun(tmp_path, sft(), True)


def test_without_resume_a_folder_with_a_run_is_refused_and_left_as_it_is(left: Path) -> None:
    before = (left / "resume.json").read_text()
    with pytest.raises(ConfigError, match="holds another run") as caught:
        OwnRun(left, sft())
    assert "resume=True" in caught.value.hint
    assert (left / "resume.json").read_text() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2, "checkpoints": [], "given": {}}', '{"format": 1}'])
def test_a_record_that_cannot_be_read_is_an_error_and_no_fresh_start(left: Path, text: str) -> None:
    (left / "resume.json").write_text(text)
    for resume in (True, "auto"):
        with pytest.raises(CheckpointError, match="cannot be read from"):
            OwnRun(left, sft(), resume)  # type: ignore[arg-type]


def test_rows_of_a_run_that_says_nothing_of_its_checkpoints_are_not_taken_over(left: Path) -> None:
    (left / "resume.json").unlink()
    for resume in (True, "auto"):
        with pytest.raises(ConfigError, match="does not say where its checkpoints are"):
            OwnRun(left, sft(), resume)  # type: ignore[arg-type]


OPEN = """
import json, sys
from pathlib import Path
from opentinker.training import folder_lock
from opentinker.training.own_run import OwnRun
OwnRun(Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3]), {"train": "2 rows"}).begin("ann", "job-0d")
"""


def elsewhere(folder: Path, resume: Resume) -> str:
    """What another process, which would drive the run in this folder, says at its end."""
    words = [sys.executable, "-c", OPEN, str(folder), json.dumps(sft()), json.dumps(resume)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stderr


def test_two_processes_do_not_drive_one_run(left: Path) -> None:
    OwnRun(left, sft(), True, {"train": "2 rows"}).begin("ann", "job-0b")
    OwnRun(left, sft(), True, {"train": "2 rows"}).begin("ann", "job-0c")  # this process goes on with its own
    (left / "metrics.jsonl").unlink()
    for resume in (False, True):
        assert f"{ConflictError.__name__}: another process drives the run" in elsewhere(left, resume)


def test_what_was_read_of_a_run_stays_true_while_its_next_job_waits_for_a_server(tmp_path: Path) -> None:
    """Else another process could do some of its steps meanwhile, and end, and they would be taken back."""
    begun = OwnRun(tmp_path, sft(), given={"train": "2 rows"})
    begun.begin("ann", "job-0a")
    Recorder(tmp_path, sft(), checkpoints=begun)
    begun.saved(2, {"": 2})
    code = OPEN.replace('.begin("ann", "job-0d")', "; print('read', flush=True); input()")
    words = [sys.executable, "-c", code, str(tmp_path), json.dumps(sft()), "true"]
    folder_lock._locks.pop(tmp_path.resolve()).close()  # as if this process had ended
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as waits:
        assert waits.stdout is not None
        assert waits.stdout.readline() == "read\n"
        with pytest.raises(ConflictError, match="another process drives the run"):
            OwnRun(tmp_path, sft(), True, {"train": "2 rows"})
        waits.communicate("\n")
    assert OwnRun(tmp_path, sft(), True, {"train": "2 rows"}).step == 2


def test_a_run_that_is_refused_here_may_be_driven_elsewhere(left: Path) -> None:
    folder_lock._locks.pop(left.resolve()).close()
    with pytest.raises(ConfigError, match=r"^training.seed"):
        OwnRun(left, sft(training__seed=9), True, {"train": "2 rows"})
    assert elsewhere(left, True) == ""


def test_past_versions_of_another_job_are_refused_before_anything_runs(tmp_path: Path) -> None:
    config = {"environment": {"name": "duel"}, "agents": {"black": {}, "white": {"pool": {"of": "black"}}}}
    pooled = RLJobConfig.model_validate({"base_model": "m", "lora": {}, **config}).model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"agents.white.pool: past versions are checkpoints of the job that they played in"):
        OwnRun(tmp_path, pooled, "auto")
    OwnRun(tmp_path, pooled)


def test_each_agents_checkpoints_are_called_as_its_server_calls_them() -> None:
    agents = {"black": {}, "white": {}, "red": {"server": "second"}, "blue": {"server": "second"}}
    fields = {"base_model": "m", "lora": {}, "environment": {"name": "four"}, "agents": agents, "servers": {"second": {}}}
    config = RLJobConfig.model_validate(fields)
    assert policy_places(config) == {"black": None, "white": "white", "red": "second", "blue": "blue"}
    assert policy_places(RLJobConfig.model_validate({"base_model": "m", "environment": {"name": "guess"}})) == {"": None}


@pytest.mark.parametrize("line", ["\0\0\0", "7", "{}"])
def test_a_line_of_metrics_that_is_no_row_is_named(left: Path, line: str) -> None:
    with (left / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(ConfigError, match=r"metrics.jsonl: line 2 is no row of a run"):
        Recorder(left, sft(), resume_at=6)


def test_a_full_disk_costs_neither_the_config_nor_the_record_of_a_run(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = OwnRun(left, sft(), True, {"train": "2 rows"})
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match=r"cannot write the run's folder .*: No space left"):
            run.begin("ann", "job-0b")
        with pytest.raises(ConfigError, match=r"cannot write the run's folder .*: No space left"):
            Recorder(left, sft(), resume_at=6)
    assert OwnRun(left, sft(), True, {"train": "2 rows"}).step == 6


def test_several_policies_are_remembered_together(tmp_path: Path) -> None:
    run = OwnRun(tmp_path, sft())
    run.begin("ann", "job-0a", {"black": None, "white": "white"})
    run.saved(2, {"black": 3, "white": 2})
    found = read_left(tmp_path)
    assert found is not None
    assert found.checkpoints == {2: {"black": "ann/job-0a/step-000002@3", "white": "ann/job-0a/white/step-000002@2"}}


def test_rows_are_compared_by_what_they_hold_and_objects_are_not() -> None:
    rows = [{"a": 1, "b": 2}]
    assert digests({"train": rows}) == digests({"train": [{"b": 2, "a": 1}]}) != digests({"train": [{"a": 1, "b": 3}]})
    assert digests({"train": [object()], "held_out": None, "other": "rows.jsonl"}) == {}


def test_what_is_written_is_json_that_people_can_read(left: Path) -> None:
    state = json.loads((left / "resume.json").read_text())
    assert state["checkpoints"][-1] == {"step": 6, "addresses": {"": "ann/job-0a/step-000006@7"}}
    assert SFTJobConfig.model_validate(yaml.safe_load((left / "config.yaml").read_text()))
