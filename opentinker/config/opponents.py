"""The configs of who plays a seat without learning: past versions of a policy, and models that others serve."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from opentinker.config.base import Config
from opentinker.config.requirements import SECRET_NAME, check_secrets

Count = Annotated[int, Field(ge=1)]
OWN_FIELDS = ("model", "messages", "stream", "n", "max_tokens", "temperature", "stop", "seed")
"""Of a request's body, what the config says elsewhere or what would make the answer another one."""


class PoolConfig(Config):
    """Past versions of a policy, one of which plays each game of a group. They never change."""

    of: str
    """The agent whose past versions play; it learns."""
    strategy: Literal["latest", "uniform", "pfsp"] = "uniform"
    """Who plays a group's games: 'latest' = the newest member, 'uniform' = any with the same chance, 'pfsp' = the more likely
    the harder (prioritized fictitious self-play)."""
    every: Count = 10
    """After every this many steps the version of now becomes a member; the version that the run begins with is the first."""
    size: Count = 20
    """Members. When another one enters, the oldest leaves, except the first, which is who plays in evaluations."""
    slots: Count = 2
    """Members that are on the server at a time, each in the room of an adapter (`engine.max_adapters`). Games of a step are
    against this many different members at most; another member is loaded from its checkpoint when it is drawn."""
    weighting: Literal["hard", "variance"] = "hard"
    """Of 'pfsp', with x the share of games that a member loses: 'hard' weighs by (1 - x) ** power, 'variance' by x * (1 - x),
    which looks for members of the same strength."""
    power: Annotated[float, Field(gt=0.0, le=100.0)] = 2.0
    """Of 'hard': larger looks at the strongest members only."""
    prior_games: Annotated[float, Field(ge=0.0)] = 4.0
    """Games, half of them won, that every member is taken to have played before its first."""

    @property
    def places(self) -> int:
        """Policies that it needs on the server."""
        return min(self.slots, self.size)


class ChatModelConfig(Config):
    """A model that a server with OpenAI's chat API serves. What it says is never trained on."""

    url: str
    """The API's address, up to the version: `https://api.openai.com/v1`, `http://my-vllm:8000/v1`."""
    name: str
    """The model's name there."""
    api_key_secret: Annotated[str, Field(pattern=rf"^({SECRET_NAME})?$")] = ""
    """Name of a secret of yours with the API key (`opentinker secrets set NAME`). Empty = none is sent."""
    api_key_variable: str = "OPENAI_API_KEY"
    """With `api_key_secret`: the environment variable in which the driver of a submitted job gets it. `opentinker train` and a
    `MultiAgentTrainer` take that variable from your own environment."""
    temperature: Annotated[float, Field(ge=0.0)] | None = None
    """None = the server's default."""
    max_tokens: Count | None = 256
    """Longest answer, in the model's tokens. None = the server's default."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer."""
    seeded: bool = True
    """Send a `seed` that derives from the run's; False for servers that do not take one."""
    extra: dict[str, Any] = Field(default_factory=dict)
    """Further fields of the request's body, such as `{reasoning_effort: low}`."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 60.0
    """Longest wait for one answer; the turn's own limit (`turns.turn_timeout_s`) covers all attempts."""
    retries: Annotated[int, Field(ge=0, le=100)] = 5
    """Further attempts after an answer 408, 409, 429 or 5xx, a lost connection, or none in time, each after a longer pause."""
    max_concurrent: Count = 16
    """Requests that are under way at a time; more wait."""

    @model_validator(mode="after")
    def _is_an_address(self) -> "ChatModelConfig":
        try:
            parts = urlsplit(self.url)
            port_is_one = parts.port is None or parts.port > 0
        except ValueError:
            raise ValueError("url is not the address of a server") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_one:
            raise ValueError("url begins with http:// or https:// and a server's name")
        if "@" in parts.netloc or parts.query or parts.fragment:
            # It may hold a key, so it is not repeated.
            raise ValueError("url holds no login and no parameters: configs are stored and shown; use api_key_secret")
        check_secrets({self.api_key_variable: self.api_key_secret or "none"})
        if taken := [name for name in self.extra if name in OWN_FIELDS]:
            raise ValueError(f"extra.{taken[0]} is not for extra: {_instead(taken[0])}")
        return self

    def secrets(self) -> dict[str, str]:
        """Environment variable -> name of the secret that the driver gets in it."""
        return {self.api_key_variable: self.api_key_secret} if self.api_key_secret else {}


def _instead(name: str) -> str:
    fields = {"model": "name", "seed": "seeded", "max_tokens": "max_tokens", "temperature": "temperature", "stop": "stop"}
    return f"use {fields[name]}" if name in fields else "an answer is one message, in one piece"
