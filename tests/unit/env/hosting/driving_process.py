"""The driver of one agent as its job runs it, in a process of its own, with a policy that lives in memory and is saved to
files: URL AGENT RUN HANGS_IN FOLDER RESTARTS STEPS.

Prints `hangs` when its policy hangs in a `sample` or `train_step` of the third step, and in the end a line of JSON: which steps
stand, the policy's logits, and the error, if there is one. A folder in which it was before is gone on with."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import opentinker.training.run as run_module
from opentinker.errors import OpenTinkerError
from opentinker.training.recorder import standing_rows


def fakes() -> Any:
    """The training tests' own."""
    path = Path(__file__).parents[2] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("training_fakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def policy_class(base: Any, hangs_in: str, checkpoints: Path) -> Any:
    class Kept(base):  # type: ignore[misc]
        async def sample(self, *args: Any, **kwargs: Any) -> Any:
            await self._hang("sample")
            return await super().sample(*args, **kwargs)

        async def train_step(self, *args: Any, **kwargs: Any) -> Any:
            await self._hang("train_step")
            return await super().train_step(*args, **kwargs)

        async def _hang(self, where: str) -> None:
            if where == hangs_in and self.version == 2:
                print("hangs", flush=True)
                await asyncio.sleep(3600)

        async def save(self, name: str, *, driver: Any = None, keep_last: int | None = None) -> Any:
            folder = checkpoints / f"{name}@{self.version}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "state.json").write_text(json.dumps([self.logits.tolist(), self.version, driver]))
            (folder / "manifest.json").write_text("{}")
            return {"path": str(folder), "version": self.version}

        async def load(self, name: str) -> Any:
            logits, self.version, driver = _saved(checkpoints, name)
            self.logits = np.array(logits)
            return {"version": self.version, "driver": driver}

        async def close(self) -> None:
            """As a client's."""

    return Kept


def _saved(checkpoints: Path, name: str) -> Any:
    [folder] = checkpoints.glob(f"{name}@*")
    return json.loads((folder / "state.json").read_text())


def job(made: Any, steps: int, **fields: Any) -> Any:
    """What all drivers are told alike."""
    return made.job_config(
        rollout={"groups_per_step": 8, "max_turns": 1},
        evaluation={"at_start": False, "at_end": False},
        training={"steps": steps, "save_every": 1, "optimizer": {"learning_rate": 1.0}},
        **fields,
    )


def main(url: str, agent: str, run: str, hangs_in: str, folder: Path, restarts: int, steps: int) -> None:
    made = fakes()
    policy = policy_class(made.BanditPolicy, hangs_in, folder / "checkpoints")
    clients: list[Any] = []

    def connect(**_: Any) -> Any:
        clients.append(policy())
        return clients[-1]

    run_module.PolicyClient = connect  # type: ignore[assignment, misc]
    config = job(
        made,
        steps,
        environment={"name": url},
        agents={agent: {}},
        coordinator={"run": run},
        scheduling={"max_restarts": restarts},
    )
    error = None
    try:
        again = folder.exists()
        fields = config.model_dump(mode="json")
        run_module.run_rl_job(fields, endpoint=url, token="", policy=agent, run_dir=folder, resume=again)
    except OpenTinkerError as caught:
        error = caught.to_problem()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    standing = [row["step"] for row in standing_rows(rows) if row["kind"] == "agents_step"]
    logits = clients[-1].logits.tolist() if clients else None
    print(json.dumps({"steps": standing, "logits": logits, "joined": len(clients), "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:5], Path(sys.argv[5]), int(sys.argv[6]), int(sys.argv[7]))
