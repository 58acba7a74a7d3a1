"""Drivers in processes of their own, on a real environment server: one is killed within a game or an update, the other hears
who, and both go on from their checkpoints."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from driving_process import fakes, job
from hosting_tools import TOKEN, Hosted, Serve

from opentinker.env.load import load_environment
from opentinker.errors import ConflictError
from opentinker.multiagent.coordination.member import Member
from opentinker.multiagent.phases import Moment, Phase
from opentinker.multiagent.seats import identity_of
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder

HERE = Path(__file__).parent
GAME = f"{HERE / 'hosted_games.py'}:Digits"
PATIENCE_S = 120.0
LEASE_S = 4.0
STEPS = 4


class Driver:
    """A process that drives one agent."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(
        cls, there: Hosted, folder: Path, agent: str, run: str, *, hangs_in: str = "", restarts: int = 0
    ) -> "Driver":
        options = [there.url, agent, run, hangs_in, str(folder / f"{run}-{agent}"), str(restarts), str(STEPS)]
        process = await asyncio.create_subprocess_exec(
            sys.executable, str(HERE / "driving_process.py"), *options, stdout=asyncio.subprocess.PIPE
        )
        return cls(process)

    async def kill_when_it_hangs(self) -> None:
        assert self._process.stdout is not None
        assert await asyncio.wait_for(self._process.stdout.readline(), PATIENCE_S) == b"hangs\n"
        self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def said(self) -> Any:
        """What it prints in the end."""
        out, _ = await asyncio.wait_for(self._process.communicate(), PATIENCE_S)
        return json.loads(out.splitlines()[-1])


async def in_one_process(folder: Path) -> list[Any]:
    """The logits of both agents after all steps of a run that one process drives, and nobody kills."""
    made = fakes()
    black, white = made.BanditPolicy(), made.BanditPolicy()

    async def create(*_: Any, **__: Any) -> Any:
        return white

    black.create_policy = create
    config = job(made, STEPS, agents={"black": {}, "white": {}}, lora={"rank": 4})
    recorder = Recorder(folder / "alone", config.model_dump(mode="json"))
    loop = await AgentsLoop.connect(config, load_environment(GAME), black, recorder)
    await loop.run(STEPS)
    return [black.logits.tolist(), white.logits.tolist()]


async def test_a_driver_that_is_killed_is_named_to_the_others_and_all_go_on_from_their_checkpoints(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_ENV_TOKEN", TOKEN)
    there = await serve(load_environment(GAME), lease_s=LEASE_S)

    async def killed_in_a_game() -> None:
        black = await Driver.start(there, tmp_path, "black", "game")
        white = await Driver.start(there, tmp_path, "white", "game", hangs_in="sample")
        await white.kill_when_it_hangs()
        told = await black.said()
        assert told["steps"] == [1, 2]
        assert told["error"]["code"] == "agent_lost"
        assert f"the driver of 'white' is lost: it gave no sign of life for {LEASE_S:g} s" in told["error"]["detail"]

    async def killed_in_an_update() -> list[Any]:
        """White is started again at once, and black joins anew by itself."""
        black = await Driver.start(there, tmp_path, "black", "update", restarts=1)
        white = await Driver.start(there, tmp_path, "white", "update", hangs_in="train_step")
        await white.kill_when_it_hangs()
        white = await Driver.start(there, tmp_path, "white", "update")
        return [await black.said(), await white.said()]

    alone = await in_one_process(tmp_path)
    _, ended = await asyncio.gather(killed_in_a_game(), killed_in_an_update())
    for driver, logits, joined in zip(ended, alone, (2, 1), strict=True):
        assert driver == {"steps": [1, 2, 3, 4], "logits": logits, "joined": joined, "error": None}

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=there.url, headers=headers) as client:
        assert (await client.get("/coordinator/runs")).status_code == 200
        assert (await client.post("/coordinator/dance", content=b"\x80")).status_code == 404
        assert (await client.post("/coordinator/talk", content=b"\x80")).status_code == 400
        assert (await client.post("/coordinator/alive", content=b"\x81\xa6driver\xa1x")).status_code == 404
        assert (await client.post("/coordinator/join", content=b"\x80")).status_code == 400
    assert (await asyncio.to_thread(httpx.get, f"{there.url}/coordinator/runs")).status_code == 401


async def test_a_program_that_has_ended_its_event_loop_has_left_in_order(serve: Serve) -> None:
    """As an interactive job's does when it is completed; its lease would last for a minute."""
    game = load_environment(GAME)
    there = await serve(game, lease_s=60.0)
    terms = {f"environment.{key}": value for key, value in identity_of(game, {}).items()}
    joined = asyncio.Event()

    def program(loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner() as runner:
            member = Member(there.url, TOKEN, "duel", {"black": "policy"})
            runner.run(member.join(terms, [0]))
            loop.call_soon_threadsafe(joined.set)
            assert runner.run(member.started()) == 0

    white = Member(there.url, TOKEN, "duel", {"white": "policy"})
    running = asyncio.create_task(asyncio.to_thread(program, asyncio.get_running_loop()))
    await joined.wait()
    await white.join(terms, [0])
    assert await white.started() == 0
    await running
    with pytest.raises(ConflictError, match="the driver of 'black' left in order"):
        await asyncio.wait_for(white.finish(Moment(0, Phase.ROLLOUT)), PATIENCE_S)
    await white.leave()
