"""Servers made with OpenEnv, run as a process of their own: `python openenv_server.py KIND`; prints its port."""

import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State
from pydantic import Field


class Guess(Action):
    text: str


class Move(Action):
    row: int = Field(ge=0, le=9)
    column: int


class Hint(Observation):
    text: str


class Board(Observation):
    board: list[list[int]]
    legal: list[str] = Field(default_factory=list)


class GuessTheSeed(Environment):  # type: ignore[misc]
    """Say the seed's last digit within five guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Hint:
        self.secret, self.guesses = (seed or 0) % 10, 0
        return Hint(text=f"Guess a digit. It is {'even' if self.secret % 2 == 0 else 'odd'}.")

    def step(self, action: Guess, timeout_s: float | None = None, **_: Any) -> Hint:
        if action.text == "crash":
            raise RuntimeError("the environment's own fault")
        self.guesses += 1
        right = action.text == str(self.secret)
        done = right or self.guesses == 5
        return Hint(text="Yes." if right else "No.", reward=1.0 if right else 0.0, done=done)

    @property
    def state(self) -> State:
        return State(step_count=getattr(self, "guesses", 0))


class Grid(Environment):  # type: ignore[misc]
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, size: int = 2, **_: Any) -> Board:
        self.board = [[0] * size for _ in range(size)]
        return Board(board=self.board, legal=["any"])

    def step(self, action: Move, timeout_s: float | None = None, **_: Any) -> Board:
        self.board[action.row][action.column] = 1
        return Board(board=self.board, reward=0.5, done=all(map(all, self.board)))

    @property
    def state(self) -> State:
        return State()


def tools() -> Any:
    from fastmcp import FastMCP
    from openenv.core.env_server.mcp_environment import MCPEnvironment

    server = FastMCP("calculator")

    @server.tool
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b

    class Calculator(MCPEnvironment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__(server)

        def reset(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> Observation:
            return Observation(done=False, reward=0.0, metadata={"question": "2 + 3"})

        def _step_impl(self, action: Action, timeout_s: float | None = None, **_: Any) -> Observation:
            return Observation(done=True, reward=0.0)

        @property
        def state(self) -> State:
            return State()

    return Calculator


def main() -> None:
    kind, sessions = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 16
    if kind == "tools":
        from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation

        app = create_fastapi_app(tools(), CallToolAction, CallToolObservation, max_concurrent_envs=sessions)
    else:
        made = {"guess": (GuessTheSeed, Guess, Hint), "grid": (Grid, Move, Board)}[kind]
        app = create_fastapi_app(*made, max_concurrent_envs=sessions)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    print(listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="critical")).run(sockets=[listener])


if __name__ == "__main__":
    main()
