"""Where the policies of several agents are: each is made on the server of its agent, whose model has a tokenizer, a chat
template and a context of its own."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from opentinker.config.job import RLJobConfig
from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError, OpenTinkerError, ServerLostError, UnavailableError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.rl import TrainablePolicy


class HostedPolicy(TrainablePolicy, Protocol):
    """A policy that can make others beside itself."""

    async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: LoraConfig | None = None) -> Any: ...


@dataclass(frozen=True)
class Home:
    """What prompts are made of, for a server's model."""

    renderer: ConversationRenderer
    max_model_len: int


async def find_homes(
    config: RLJobConfig, own: HostedPolicy, further: Mapping[str, HostedPolicy]
) -> tuple[dict[str, TrainablePolicy], dict[str, Home]]:
    """(policies, homes) by agent. `own` is the policy that the job's own server began with; `further` are those of its other
    servers, by their names. What is not there yet is made: the first agent of a server has the policy that is.

    Raises:
        ConfigError: a server of the config is not among them.
        RenderingError: a model has no usable chat template.
        OpenTinkerError: what a server reports; of one beside the job's own, with its name.
    """
    hosts = {"": own, **further}
    if missing := [name for name in config.servers if name not in hosts]:
        raise ConfigError(
            f"servers: there is no server '{missing[0]}'", hint="a job in a user's process has it from create_job(servers=...)"
        )
    policies: dict[str, TrainablePolicy] = {}
    for place, name in enumerate(config.policies):
        agent, host = config.agents[name], hosts[config.agents[name].server]
        if host not in policies.values():
            policies[name] = host
            continue
        with _named(agent.server):
            policies[name] = await host.create_policy(
                config.lora_of(name), name=name, seed=config.training.seed + place, critic=config.critic_of(name)
            )
    asked = {config.agents[name].server for name in policies}
    found = dict(zip(asked, await asyncio.gather(*(_home(name, hosts[name]) for name in asked)), strict=True))
    return policies, {name: found[config.agents[name].server] for name in policies}


async def home_of(policy: TrainablePolicy) -> Home:
    """Asks the policy's server.

    Raises:
        RenderingError: the model has no usable chat template.
        OpenTinkerError: what the server reports.
    """
    info = await policy.info()
    tokenizer = ChatTokenizer.from_files(await policy.tokenizer_files())
    renderer = ConversationRenderer(tokenizer, info["stop_token_ids"], image_placeholder=info.get("image_placeholder"))
    return Home(renderer, int(info["max_model_len"]))


async def _home(server: str, policy: HostedPolicy) -> Home:
    with _named(server):
        return await home_of(policy)


@contextmanager
def _named(server: str) -> Iterator[None]:
    """Puts the name of a server beside the job's own before what it reports."""
    try:
        yield
    except OpenTinkerError as error:
        if not server:
            raise
        raise type(error)(f"server '{server}': {error.detail}", hint=error.hint) from error


@contextmanager
def lost_with(config: RLJobConfig, agent: str) -> Iterator[None]:
    """Where a job has several servers: puts the name of the agent before the news that its server is gone."""
    try:
        yield
    except (ServerLostError, UnavailableError) as error:
        if not config.servers:
            raise
        raise type(error)(f"the server of '{agent}': {error.detail}", hint=error.hint) from error


async def check_alive(config: RLJobConfig, policies: Mapping[str, TrainablePolicy]) -> None:
    """Ask every server that the policies are on. Raises: OpenTinkerError, when one is gone; it names its agent."""
    first = {config.agents[name].server: name for name in reversed(list(policies))}
    for name in first.values():
        with lost_with(config, name):
            await policies[name].info()
