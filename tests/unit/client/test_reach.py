"""The way to a job's server: direct where its own server answers there, else through the scheduler."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from opentinker.client import reach
from opentinker.client.reach import choose_endpoint

PROXIED = "http://127.0.0.1:8780/v1/jobs/job-1/server"


class Server:
    def __init__(self) -> None:
        self.health: Any = {"status": "ok"}
        self.policies = {"pol-1"}
        self.tokens: list[str] = []
        self.asked = 0

    async def on_health(self, request: Request) -> JSONResponse:
        self.asked += 1
        return JSONResponse(self.health)

    async def on_policy(self, request: Request) -> JSONResponse:
        self.tokens.append(request.headers["authorization"])
        return JSONResponse({}, 200 if request.path_params["policy"] in self.policies else 401)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def record(server: Server) -> Iterator[dict[str, str]]:
    app = Starlette(routes=[Route("/health", server.on_health), Route("/v1/policies/{policy}", server.on_policy)])
    listener = socket.create_server(("127.0.0.1", 0))
    serving = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [listener]})
    thread.start()
    endpoint = f"http://127.0.0.1:{listener.getsockname()[1]}"
    yield {"endpoint": endpoint, "proxy": "/v1/jobs/job-1/server", "policy": "pol-1", "token": "t"}
    serving.should_exit = True
    thread.join(5)


def test_a_server_that_answers_is_used_directly(record: dict[str, str]) -> None:
    assert choose_endpoint(record, "http://127.0.0.1:8780", "auto") == record["endpoint"]


def test_one_that_does_not_answer_is_used_through_the_scheduler(
    record: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert choose_endpoint({**record, "endpoint": "http://127.0.0.1:9"}, "http://127.0.0.1:8780/", "auto") == PROXIED
    monkeypatch.setattr(reach, "PROBE_S", 0.1)
    silent = socket.create_server(("127.0.0.1", 0))
    endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
    assert choose_endpoint({**record, "endpoint": endpoint}, "http://127.0.0.1:8780", "auto") == PROXIED
    silent.close()


def test_something_else_on_that_address_is_not_the_server(record: dict[str, str], server: Server) -> None:
    server.policies.clear()
    assert choose_endpoint(record, "http://127.0.0.1:8780", "auto") == PROXIED
    server.health, server.tokens = {"hello": "world"}, []
    assert choose_endpoint(record, "http://127.0.0.1:8780", "auto") == PROXIED
    assert server.tokens == [], "no token goes to what is no job server"


def test_a_loopback_address_of_another_machine_is_not_even_tried(record: dict[str, str], server: Server) -> None:
    assert choose_endpoint(record, "https://cluster.example/ot", "auto") == "https://cluster.example/ot/v1/jobs/job-1/server"
    assert server.asked == 0


def test_the_choice_can_be_made_by_hand(record: dict[str, str], server: Server) -> None:
    assert choose_endpoint(record, "http://127.0.0.1:8780", "proxy") == PROXIED
    assert choose_endpoint({**record, "endpoint": "http://127.0.0.1:9"}, "http://127.0.0.1:8780", "direct").endswith(":9")
    assert server.asked == 0
