"""Submitted jobs, through the command line."""

import json
import os
import signal
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from e2e_tools import SLOTS, Cluster, opentinker, wait_until

from opentinker.client.local import API_KEY_VARIABLE


def submitted(cluster: Cluster, project: Path, *overrides: str) -> dict[str, Any]:
    """Submit the project's job and give its record."""
    result = opentinker("submit", project / "job.yaml", *overrides, "--state-dir", cluster.state_dir)
    assert result.returncode == 0, result.stderr
    return cluster.client.job(result.stdout.strip())


def ended(cluster: Cluster, job_id: str, timeout_s: float = 180.0) -> dict[str, Any]:
    wait_until(lambda: cluster.client.job(job_id)["ended_at"] is not None, timeout_s, f"{job_id} has ended")
    return cluster.client.job(job_id)


def all_slots_are_free(cluster: Cluster) -> bool:
    return sum(node["free_cpu_slots"] for node in cluster.client.cluster()["nodes"]) == SLOTS


def test_a_submitted_job_trains_an_environment_that_travelled_and_leaves_its_files(cluster: Cluster, project: Path) -> None:
    result = opentinker("submit", project / "job.yaml", "name=mine", "--follow", "--state-dir", cluster.state_dir, cwd="/")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mine: step 2/2" in result.stdout
    assert "held-out exact" in result.stdout
    job_id = result.stdout.splitlines()[0]
    run_dir = Path(cluster.client.job(job_id)["run_dir"])
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 2
    assert summary["tokens_sampled"] > 0
    assert summary["mismatch_kl_mean"] < 0.01
    assert Path(summary["report"]).is_file()
    assert any(Path(summary["checkpoint"]).iterdir())
    kinds = [json.loads(line)["kind"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert kinds == ["evaluation", "step", "step", "evaluation"]
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["environment"]["name"] == "games.py:Echo"
    wait_until(lambda: all_slots_are_free(cluster), 60, "the job's slot is free")

    listed = opentinker("ps", "--state-dir", cluster.state_dir).stdout
    assert job_id in listed
    assert "COMPLETED" in listed
    described = opentinker("describe", job_id, "--state-dir", cluster.state_dir).stdout
    assert "max_tokens: 6" in described
    assert "token:" not in described


def test_an_environment_gets_its_packages_and_secrets_and_its_log_shows_what_it_printed_but_no_secret(
    cluster: Cluster, project: Path
) -> None:
    wheel = project.parent / "ot_e2e_package-1.0-py3-none-any.whl"
    info = "ot_e2e_package-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ot_e2e_package.py", 'PROMPT = "Say something."\n')
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: ot-e2e-package\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    (project / "requirements.txt").write_text(f"ot-e2e-package @ {wheel.as_uri()}\n")
    (project / "value").write_text("sk-tr0ub4dor\n")
    words = 'import os\nfrom ot_e2e_package import PROMPT\nprint("the key is", os.environ["OT_E2E_KEY"])\n'
    (project / "words.py").write_text(words)
    secrets = ("secrets", "set", "e2e", "--from-file", project / "value", "--state-dir", cluster.state_dir)
    assert opentinker(*secrets).returncode == 0
    (project / "value").unlink()
    brief = ("training.steps=1", "evaluation.at_start=false", "evaluation.at_end=false")
    job = submitted(cluster, project, *brief, "environment.secrets.OT_E2E_KEY=e2e")
    followed = opentinker("logs", "-f", job["id"], "--state-dir", cluster.state_dir)
    assert followed.returncode == 0
    job = ended(cluster, job["id"])
    assert (job["state"], job["cause"]) == ("COMPLETED", "")
    log = opentinker("logs", job["id"], "--state-dir", cluster.state_dir).stdout
    assert followed.stdout == log
    assert "Successfully installed ot-e2e-package-1.0" in log
    assert "the key is [secret e2e]" in log
    files = [path for path in [*Path(job["run_dir"]).rglob("*"), *cluster.state_dir.rglob("*")] if path.is_file()]
    assert not any(b"sk-tr0ub4dor" in path.read_bytes() for path in files)
    wait_until(lambda: all_slots_are_free(cluster), 60, "the job's slot is free")


def test_an_environment_that_always_raises_fails_the_job_with_its_own_words(cluster: Cluster, project: Path) -> None:
    job = submitted(cluster, project, "environment.name=games.py:Raises", "evaluation.at_start=false", "training.steps=9")
    job = ended(cluster, job["id"])
    assert job["state"] == "FAILED"
    assert "the answers are missing" in job["cause"]


def test_an_environment_that_sometimes_never_returns_does_not_stall_the_job(cluster: Cluster, project: Path) -> None:
    result = opentinker(
        "submit",
        project / "job.yaml",
        "environment.name=games.py:Hangs",
        "rollout.step_timeout_s=0.5",
        "--follow",
        "--state-dir",
        cluster.state_dir,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    job = cluster.client.job(result.stdout.splitlines()[0])
    rows = cluster.client.metrics(job["id"])["rows"]
    assert sum(row["errors"] for row in rows) > 0
    assert "error_timeout" in json.dumps(rows)


def test_a_cancelled_job_returns_its_slot(cluster: Cluster, project: Path) -> None:
    job = submitted(cluster, project, "environment.name=games.py:Slow", "training.steps=1000")
    wait_until(lambda: bool(cluster.client.metrics(job["id"])["rows"]), 180, "the job trains")
    result = opentinker("cancel", job["id"], "--state-dir", cluster.state_dir)
    assert result.stdout.split() == [job["id"], "CANCELLED"]
    wait_until(lambda: all_slots_are_free(cluster), 60, "the job's slot is free")


def test_a_server_killed_while_training_fails_the_job_with_the_cause_and_returns_the_slot(
    cluster: Cluster, project: Path
) -> None:
    job = submitted(cluster, project, "environment.name=games.py:Slow", "training.steps=1000")
    wait_until(lambda: bool(cluster.client.metrics(job["id"])["rows"]), 180, "the job trains")
    os.kill(cluster.client.job(job["id"])["server"]["pid"], signal.SIGKILL)
    job = ended(cluster, job["id"], 60.0)
    assert job["state"] == "FAILED"
    assert "server" in job["cause"] or "worker" in job["cause"]
    wait_until(lambda: all_slots_are_free(cluster), 60, "the job's slot is free")


def test_an_unknown_model_is_refused_before_anything_starts(cluster: Cluster, project: Path) -> None:
    result = opentinker("submit", project / "job.yaml", "base_model=smollm3-13b", "--state-dir", cluster.state_dir)
    assert result.returncode == 1
    assert "smollm3-13b" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("key", ["wrong", "ot-0000"])
def test_a_wrong_key_gets_nothing(cluster: Cluster, key: str, tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if name != API_KEY_VARIABLE}
    (tmp_path / "key").write_text(key)
    result = opentinker("ps", "--url", cluster.url, "--key-file", tmp_path / "key", env=env)
    assert result.returncode == 1
    assert "key" in result.stderr
    assert "job-" not in result.stdout + result.stderr


def test_fine_tuning_teaches_an_answer_and_reinforcement_goes_on_from_it(
    cluster: Cluster, project: Path, tiny_model_dir: Path
) -> None:
    rows = [{"prompt": "Say something.", "completion": "aaa"}] * 4
    (project / "chat.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "kind": "sft",
        "base_model": str(tiny_model_dir),
        "engine": {"kind": "transformers", "max_model_len": 128},
        "trainer": {"dtype": "float32"},
        "data": {"train": {"name": "chat.jsonl"}, "held_out": {"name": "chat.jsonl"}},
        "training": {"steps": 8, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}},
    }
    (project / "sft.yaml").write_text(yaml.safe_dump(config))
    result = opentinker("submit", project / "sft.yaml", "--follow", "--state-dir", cluster.state_dir)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "chat: step 8/8  loss" in result.stdout
    job_id = result.stdout.splitlines()[0]
    summary = json.loads((Path(cluster.client.job(job_id)["run_dir"]) / "summary.json").read_text())
    assert summary["loss_after"] < 0.5 * summary["loss_before"]
    assert "held-out loss" in Path(summary["report"]).read_text()

    job = submitted(cluster, project, f"start_from={job_id}/final", "training.steps=1", "evaluation.at_end=false")
    finished = ended(cluster, job["id"])
    assert finished["state"] == "COMPLETED", finished["cause"]
    rows = [json.loads(line) for line in (Path(finished["run_dir"]) / "transcripts.jsonl").read_text().splitlines()]
    assert any("aaa" in m["content"] for row in rows for m in row["messages"] if m["role"] == "assistant")


def test_preferences_teach_an_answer_or_a_score_and_reinforcement_goes_on_from_the_policy_only(
    cluster: Cluster, project: Path, tiny_model_dir: Path
) -> None:
    rows = [{"prompt": f"Say {word}.", "chosen": "aaa", "rejected": "bbb"} for word in ("one", "two", "three", "four")]
    (project / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = {
        "kind": "preference",
        "base_model": str(tiny_model_dir),
        "engine": {"kind": "transformers", "max_model_len": 128},
        "trainer": {"dtype": "float32"},
        "data": {"train": {"name": "pairs.jsonl"}, "held_out": {"name": "pairs.jsonl"}},
        "loss": {"kind": "dpo", "beta": 0.02},
        "training": {"steps": 6, "batch_size": 4, "optimizer": {"learning_rate": 1e-2}},
    }
    (project / "dpo.yaml").write_text(yaml.safe_dump(config))
    (project / "scores.yaml").write_text(yaml.safe_dump({**config, "loss": {"kind": "bradley_terry"}, "lora": {"rank": 4}}))
    trained = {}
    for name in ("dpo", "scores"):
        result = opentinker("submit", project / f"{name}.yaml", "--follow", "--state-dir", cluster.state_dir)
        assert result.returncode == 0, result.stdout + result.stderr
        assert "pairs: step 6/6  loss" in result.stdout
        trained[name] = result.stdout.splitlines()[0]
        summary = json.loads((Path(cluster.client.job(trained[name])["run_dir"]) / "summary.json").read_text())
        assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.5, 1.0)  # ties, then all right
        assert summary["loss_after"] < summary["loss_before"]
        assert "held-out accuracy" in Path(summary["report"]).read_text()

    job = submitted(cluster, project, f"start_from={trained['dpo']}/final", "training.steps=1", "evaluation.at_end=false")
    finished = ended(cluster, job["id"])
    assert finished["state"] == "COMPLETED", finished["cause"]
    refused = ["submit", project / "job.yaml", f"start_from={trained['scores']}/final", "--state-dir", cluster.state_dir]
    result = opentinker(*refused)
    assert result.returncode == 1
    assert "is a reward model" in result.stderr

    from_start = ("submit", project / "dpo.yaml", f"start_from={trained['dpo']}/final", "--follow")
    result = opentinker(*from_start, "--state-dir", cluster.state_dir)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "reference logprobs of 8 answers" in result.stdout
    again = json.loads((Path(cluster.client.job(result.stdout.splitlines()[0])["run_dir"]) / "summary.json").read_text())
    assert (again["accuracy_before"], again["margin_before"]) == (0.5, 0.0), "it is compared with what it started from"
