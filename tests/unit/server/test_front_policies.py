"""Further policies at the front: created and deleted with the token of another, each with a token and a sequence of its own."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from opentinker.client.messages import PolicySpec
from opentinker.errors import CheckpointError, ConflictError, NotFoundError, OpenTinkerError
from opentinker.policy_tokens import further_token, parent_of
from opentinker.server.actors import save_all
from opentinker.server.dispatch import Dispatcher
from opentinker.server.front import create_app
from opentinker.server.protocol import CommandWork, Completion, Work

TOKENS = {"alpha": "otp-a"}
SPEC = {"lora": {"rank": 4}}


class Worker:
    """Answers each work item at once, or fails it with `error`; with `held` not before `release`."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.error: OpenTinkerError | None = None
        self.held: list[Completion] | None = None
        self._done: asyncio.Queue[Completion] = asyncio.Queue()

    async def submit(self, work: Sequence[Work]) -> None:
        self.work += work
        for item in work:
            result = {"policy": item.policy, "version": 0} if isinstance(item, CommandWork) else {}
            problem = self.error.to_problem() if self.error is not None else None
            completion = Completion(item.operation, None if problem else result, problem)
            if self.held is None:
                self._done.put_nowait(completion)
            else:
                self.held.append(completion)

    def release(self) -> None:
        for completion in self.held or ():
            self._done.put_nowait(completion)
        self.held = None

    async def collect(self, timeout_s: float) -> list[Completion]:
        try:
            return [await asyncio.wait_for(self._done.get(), timeout_s)]
        except TimeoutError:
            return []

    async def upload(self, images: Sequence[bytes]) -> dict[str, Any]:
        raise AssertionError


@asynccontextmanager
async def serving(worker: Worker, **more: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(worker, TOKENS, {"base_model": "tiny"}, clock=lambda: 0.0, **more)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", headers=bearer("otp-a")) as client,
    ):
        yield client


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


async def create(client: httpx.AsyncClient, name: str | None = "beta", token: str = "otp-a", **spec: Any) -> httpx.Response:
    body = {"spec": SPEC | spec, **({} if name is None else {"policy": name})}
    return await client.post("/v1/policies?wait_s=5", json=body, headers=bearer(token))


async def test_a_policy_gets_a_token_of_its_own_and_its_own_sequence_which_begins_at_1() -> None:
    worker = Worker()
    async with serving(worker) as client:
        answer = (await create(client)).json()
        assert answer["policy"] == "beta"
        assert answer["operation"]["status"] == "done"
        own = bearer(answer["token"])
        state = (await client.get("/v1/policies/beta", headers=own)).json()
        assert state == {"policy": "beta", "version": 0, "next_seq": 1}
        body = {"seq": 1, "command": "publish"}
        published = await client.post("/v1/policies/beta/commands?wait_s=5", json=body, headers=own)
        assert published.json()["operation_id"] == "beta:c:1"
        assert (await client.get("/v1/policies/alpha")).json()["next_seq"] == 0
        for path in ("/v1/policies/beta", "/v1/operations/beta:c:1"):
            assert (await client.get(path)).status_code == 404
            assert (await client.get(path, headers=own)).status_code == 200
        assert (await client.get("/v1/policies/alpha", headers=own)).status_code == 404
        assert (await client.get("/v1/info", headers=own)).status_code == 200
    create_work = worker.work[0]
    assert isinstance(create_work, CommandWork)
    assert (create_work.policy, create_work.command) == ("beta", "create")
    assert create_work.args == PolicySpec(lora={"rank": 4}).model_dump()


async def test_the_version_of_the_creator_is_not_touched() -> None:
    worker = Worker()
    async with serving(worker) as client:
        await create(client)
        assert (await client.get("/v1/policies/alpha")).json()["version"] is None


async def test_a_repeated_request_creates_once_and_another_of_that_name_is_a_conflict() -> None:
    worker = Worker()
    async with serving(worker) as client:
        first, again = (await create(client)).json(), (await create(client)).json()
        assert first == again
        other = await create(client, seed=7)
    assert other.status_code == 409
    assert "already is a policy 'beta'" in other.json()["detail"]
    assert len(worker.work) == 1


async def test_no_policy_is_created_under_the_name_of_one_that_a_server_of_the_job_began_with() -> None:
    """Both would write to `checkpoints/policies/white`, whichever servers they are on."""
    worker = Worker()
    async with serving(worker, taken=["white"]) as client:
        refused = await create(client, "white")
        assert (refused.status_code, refused.json()["code"]) == (409, ConflictError.code)
        assert "'white' is the policy that one of the job's servers began with" in refused.json()["detail"]
        assert (await create(client, "black")).json()["operation"]["status"] == "done"
    assert [item.policy for item in worker.work] == ["black"]


async def test_an_address_that_may_mean_two_checkpoints_is_refused() -> None:
    worker = Worker()
    starts = {f"ann/job-0a/{name}": f"/runs/{name}" for name in ("final@3", "final@7", "best@5")}

    async def load(client: httpx.AsyncClient, seq: int, name: str) -> httpx.Response:
        body = {"seq": seq, "command": "load_weights", "args": {"name": name}}
        return await client.post("/v1/policies/alpha/commands?wait_s=5", json=body)

    async with serving(worker, starts=starts) as client:
        await client.post("/v1/policies/alpha/commands?wait_s=5", json={"seq": 0, "command": "create", "args": SPEC})
        refused = await load(client, 1, "job-0a/final")
        assert refused.status_code == 400
        assert "may be ann/job-0a/final@3 or ann/job-0a/final@7" in refused.json()["detail"]
        assert refused.json()["hint"] == "add its version"
        for seq, name in enumerate(("job-0a/final@7", "job-0a/best"), 1):
            assert (await load(client, seq, name)).json()["status"] == "done"
    args = [work.args for work in worker.work if isinstance(work, CommandWork) and work.command == "load_weights"]
    assert args == [{"folder": "/runs/final@7"}, {"folder": "/runs/best@5"}]


async def test_an_address_is_loaded_whole_once_the_scheduler_has_told_its_folder_and_no_folder_is() -> None:
    worker = Worker()
    app = create_app(worker, TOKENS, {"base_model": "tiny"}, clock=lambda: 0.0)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    async def load(client: httpx.AsyncClient, seq: int, **args: Any) -> httpx.Response:
        body = {"seq": seq, "command": "load", "args": args}
        return await client.post("/v1/policies/alpha/commands?wait_s=5", json=body)

    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://t", headers=bearer("otp-a")) as client,
    ):
        await client.post("/v1/policies/alpha/commands?wait_s=5", json={"seq": 0, "command": "create", "args": SPEC})
        refused = await load(client, 1, name="job-0a/step-000002")
        assert refused.status_code == 400
        assert "is not among those that this job names" in refused.json()["detail"]
        assert "Job.load" in refused.json()["hint"]
        assert "unknown argument 'folder'" in (await load(client, 1, folder="/runs/step-000002@2")).json()["detail"]
        app.state.front.name_checkpoints({"ann/job-0a/step-000002@2": "/runs/step-000002@2"})
        assert (await load(client, 1, name="job-0a/step-000002")).json()["status"] == "done"
        assert (await load(client, 2, name="step-000002")).json()["status"] == "done"
    args = [work.args for work in worker.work if isinstance(work, CommandWork) and work.command == "load"]
    assert args == [{"folder": "/runs/step-000002@2"}, {"name": "step-000002"}]


async def test_without_a_name_the_server_chooses_one() -> None:
    async with serving(Worker()) as client:
        names = {(await create(client, None)).json()["policy"] for _ in range(2)}
    assert len(names) == 2


async def test_a_policy_that_cannot_be_created_leaves_no_token_and_no_name() -> None:
    worker = Worker()
    worker.error = ConflictError("no room", hint="engine.max_adapters")
    async with serving(worker) as client:
        answer = (await create(client)).json()
        assert answer["operation"]["problem"]["hint"] == "engine.max_adapters"
        assert "token" not in answer
        assert (await client.get("/v1/policies/beta", headers=bearer(further_token("otp-a", "beta")))).status_code == 401
        worker.error = None
        assert (await create(client)).json()["operation"]["status"] == "done"


@pytest.mark.parametrize(
    "body",
    [
        {"policy": "a:b", "spec": SPEC},
        {"policy": "a/b", "spec": SPEC},
        {"policy": "", "spec": SPEC},
        {"policy": "x" * 65, "spec": SPEC},
        {"policy": "a~1", "spec": SPEC},
        {"policy": 7, "spec": SPEC},
        {"policy": "a", "spec": {"lroa": {}}},
        {"policy": "a", "spec": SPEC | {"checkpoint": "/etc"}},
        {"policy": "a", "spec": SPEC, "token": "mine"},
        [1],
    ],
)
async def test_a_malformed_request_creates_nothing(body: Any) -> None:
    worker = Worker()
    async with serving(worker) as client:
        answer = await client.post("/v1/policies", json=body)
        assert answer.status_code == 400
        assert answer.json()["code"] == "invalid_request"
    assert worker.work == []


async def test_nobody_without_a_token_creates_or_deletes() -> None:
    worker = Worker()
    async with serving(worker) as client:
        assert (await create(client, token="otp-wrong")).status_code == 401
        assert (await client.delete("/v1/policies/alpha", headers=bearer("otp-wrong"))).status_code == 401
    assert worker.work == []


async def test_a_deleted_policy_is_gone_and_a_retry_finds_the_answer() -> None:
    worker = Worker()
    async with serving(worker) as client:
        own = bearer((await create(client)).json()["token"])
        deleted = await client.delete("/v1/policies/beta?wait_s=5")
        assert deleted.json()["status"] == "done"
        assert (await client.get("/v1/policies/beta", headers=own)).status_code == 401
        assert (await client.delete("/v1/policies/beta?wait_s=5")).json() == deleted.json()
        assert (await client.delete("/v1/policies/gamma")).status_code == 404
    assert [w.command for w in worker.work if isinstance(w, CommandWork)] == ["create", "delete"]


async def test_a_policy_of_the_same_name_is_another_one() -> None:
    worker = Worker()
    async with serving(worker) as client:
        body = {"request_id": "r", "prompt": [1]}
        first = (await create(client)).json()
        old = await client.post("/v1/policies/beta/sample?wait_s=5", json=body, headers=bearer(first["token"]))
        await client.delete("/v1/policies/beta?wait_s=5")
        second = (await create(client)).json()
        assert second["token"] != first["token"]
        assert (await client.get("/v1/policies/beta", headers=bearer(first["token"]))).status_code == 401
        new = await client.post("/v1/policies/beta/sample?wait_s=5", json=body, headers=bearer(second["token"]))
        assert new.json()["operation_id"] != old.json()["operation_id"]
        assert (await client.get("/v1/policies/beta", headers=bearer(second["token"]))).json()["next_seq"] == 1
        await client.delete("/v1/policies/beta?wait_s=5")
    assert [w.policy for w in worker.work] == ["beta"] * 6


async def test_a_deletion_that_fails_leaves_the_policy_and_is_tried_anew() -> None:
    worker = Worker()
    async with serving(worker) as client:
        own = bearer((await create(client)).json()["token"])
        worker.error = ConflictError("the engine is busy")
        assert (await client.delete("/v1/policies/beta?wait_s=5")).json()["status"] == "failed"
        assert (await client.get("/v1/policies/beta", headers=own)).status_code == 200
        worker.error = NotFoundError("its client has deleted its weights")
        assert (await client.delete("/v1/policies/beta?wait_s=5")).json()["status"] == "failed"
        assert (await client.get("/v1/policies/beta", headers=own)).status_code == 401


async def test_who_may_delete_what() -> None:
    async with serving(Worker()) as client:
        beta = (await create(client)).json()["token"]
        gamma = (await create(client, "gamma", token=beta)).json()["token"]
        assert (await client.delete("/v1/policies/alpha")).status_code == 409
        assert (await client.delete("/v1/policies/alpha", headers=bearer(beta))).status_code == 404
        assert (await client.delete("/v1/policies/beta", headers=bearer(gamma))).status_code == 404
        assert (await client.delete("/v1/policies/gamma?wait_s=5", headers=bearer(beta))).json()["status"] == "done"
        await create(client, "delta", token=beta)
        # The job's own may delete any of them, also when their creator is gone.
        assert (await client.delete("/v1/policies/beta?wait_s=5")).json()["status"] == "done"
        assert (await client.delete("/v1/policies/delta?wait_s=5")).json()["status"] == "done"


async def test_commands_that_wait_for_a_predecessor_end_with_their_policy() -> None:
    dispatcher = Dispatcher(Worker(), lambda: 0.0)
    waiting = dispatcher.command("beta", 2, b"", "publish", {})
    dispatcher.forget("beta")
    assert waiting.problem is not None
    assert waiting.problem["code"] == "not_found"
    assert dispatcher.idle_s == 0.0


async def command(client: httpx.AsyncClient, policy: str, token: str, command: str, args: dict[str, Any]) -> None:
    body = {"seq": 1, "command": command, "args": args}
    answer = await client.post(f"/v1/policies/{policy}/commands?wait_s=5", json=body, headers=bearer(token))
    assert answer.json()["status"] == "done", answer.json()


async def test_a_checkpoint_of_the_clusters_own_is_written_for_every_policy_that_may_have_learned() -> None:
    worker = Worker()
    app = create_app(worker, TOKENS, {"base_model": "tiny"})
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=bearer("otp-a")) as client:
            token = (await create(client)).json()["token"]
            await command(client, "beta", token, "optim_step", {})
            slot = (await create(client, "white.0")).json()["token"]
            await command(client, "white.0", slot, "load_weights", {"name": "pool-000004", "policy": "beta"})
            worker.work.clear()
        saved = await save_all(app.state.front, "alpha", "stopped", 30.0)
        assert saved["policy"] == "alpha"
        assert [(w.policy, w.command) for w in worker.work if isinstance(w, CommandWork)] == [
            ("alpha", "save"),
            ("beta", "save"),
        ]
        worker.error = CheckpointError("the disk is full")
        with pytest.raises(CheckpointError, match="full"):
            await save_all(app.state.front, "alpha", "stopped", 30.0)


def test_a_token_tells_its_parent_and_nothing_else_does() -> None:
    token = further_token("otp-a", "beta.1")
    assert parent_of(token, ["otp-b", "otp-a"]) == "otp-a"
    for wrong in (token + "x", token[:-1], "otp-a", "otp-a.beta.1", "", further_token("otp-c", "beta.1")):
        assert parent_of(wrong, ["otp-b", "otp-a"]) is None
    assert "otp-a" not in token.removeprefix("otp-")
