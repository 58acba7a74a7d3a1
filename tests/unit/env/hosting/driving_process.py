"""The driver of one agent, in a process of its own, with a policy that lives in memory: URL AGENT RUN HANGS_IN FOLDER.

Prints `hangs` when its policy hangs in a `sample` or `train_step`, and in the end a line of JSON: how many steps were done, and
the error, if there is one."""

import asyncio
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from opentinker.env.load import load_environment
from opentinker.errors import OpenTinkerError
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder


def fakes() -> Any:
    """The training tests' own."""
    path = Path(__file__).parents[2] / "training" / "conftest.py"
    spec = importlib.util.spec_from_file_location("training_fakes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def main(url: str, agent: str, run: str, hangs_in: str, folder: Path) -> None:
    made = fakes()
    policy = made.BanditPolicy()
    if hangs_in:
        call = getattr(policy, hangs_in)

        async def hanging(*args: Any, **kwargs: Any) -> Any:
            if policy.version < 1:  # all is well in the first step
                return await call(*args, **kwargs)
            print("hangs", flush=True)
            await asyncio.sleep(3600)

        setattr(policy, hangs_in, hanging)
    config = made.job_config(
        environment={"name": url},
        agents={agent: {}},
        coordinator={"run": run},
        algorithm={"group_size": 8},
        rollout={"groups_per_step": 8, "max_turns": 1},
        evaluation={"at_start": False, "at_end": False},
    )
    loop, error = None, None
    try:
        recorder = Recorder(folder, config.model_dump(mode="json"))
        loop = await AgentsLoop.connect(config, load_environment(url), policy, recorder)
        await loop.run(4)
        await loop.close()
    except OpenTinkerError as caught:
        error = caught.to_problem()
    print(json.dumps({"steps": loop.steps_done if loop else 0, "error": error}), flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:5], Path(sys.argv[5])))
