"""Drivers in processes of their own, on a real environment server: they train together, and hear of one that is killed within a
game or an update."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from hosting_tools import TOKEN, Hosted, Serve

from opentinker.env.load import load_environment

HERE = Path(__file__).parent
PATIENCE_S = 90.0
LEASE_S = 4.0


async def driver(there: Hosted, folder: Path, agent: str, run: str, hangs_in: str = "") -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / "driving_process.py"),
        there.url,
        agent,
        run,
        hangs_in,
        str(folder / f"{run}-{agent}"),
        stdout=asyncio.subprocess.PIPE,
    )


async def said(process: asyncio.subprocess.Process) -> Any:
    """What a driver prints in the end."""
    out, _ = await asyncio.wait_for(process.communicate(), PATIENCE_S)
    return json.loads(out.splitlines()[-1])


async def test_a_driver_that_is_killed_is_named_to_the_others_wherever_it_was(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENTINKER_ENV_TOKEN", TOKEN)
    there = await serve(load_environment(f"{HERE / 'hosted_games.py'}:Digits"), lease_s=LEASE_S)

    async def killed(where: str) -> Any:
        black = await driver(there, tmp_path, "black", where)
        white = await driver(there, tmp_path, "white", where, hangs_in=where)
        assert white.stdout is not None
        assert await asyncio.wait_for(white.stdout.readline(), PATIENCE_S) == b"hangs\n"
        white.send_signal(signal.SIGKILL)
        await white.wait()
        return await said(black)

    for told in await asyncio.gather(killed("sample"), killed("train_step")):
        assert told["steps"] == 1
        assert told["error"]["code"] == "agent_lost"
        assert f"the driver of 'white' is lost: it gave no sign of life for {LEASE_S:g} s" in told["error"]["detail"]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(base_url=there.url, headers=headers) as client:
        shown = (await client.get("/coordinator/runs")).json()["runs"]
        assert {run["run"]: run["state"] for run in shown}.items() >= {"sample": "ended", "train_step": "ended"}.items()
        assert (await client.post("/coordinator/dance", content=b"\x80")).status_code == 404
        assert (await client.post("/coordinator/talk", content=b"\x80")).status_code == 400
    assert (await asyncio.to_thread(httpx.get, f"{there.url}/coordinator/runs")).status_code == 401
