"""The configs of the servers that a job has beside its own. They are made whole when a config is read: what one does not say is
the job's, so that the stored config says of each what it has."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from opentinker.config.agents import AgentConfig, bound_elsewhere, places_of_pool
from opentinker.config.arena import places_of_arena
from opentinker.config.base import Config
from opentinker.config.resources import Resources
from opentinker.config.server import EngineConfig, LoraConfig, TrainerConfig, with_whole_gpu
from opentinker.errors import ConfigError

MAX_SERVERS = 15
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")
_SECTIONS = ("lora", "engine", "trainer", "resources")


class FurtherServerConfig(Config):
    """A server beside the job's own. What it does not say is the job's; within `engine` and `trainer`, field by field."""

    base_model: str = ""
    """Its model, with its own tokenizer and chat template; "" = the job's."""
    lora: LoraConfig | None = None
    """An adapter to train; null trains the full parameters, and then the server has one policy."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    resources: Resources = Resources()
    critic: LoraConfig | None = None
    """Of an interactive job: the adapter of a critic beside the server's policy, for PPO. In an `rl` job the algorithms of
    agents say who has one."""


def _named(servers: dict[str, FurtherServerConfig]) -> dict[str, FurtherServerConfig]:
    for name in servers:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:80]!r} cannot be a server's name: up to 32 letters, digits, '_' and '-', no sign first")
    return servers


Servers = Annotated[dict[str, FurtherServerConfig], Field(max_length=MAX_SERVERS), AfterValidator(_named)]


def whole_servers(values: Any) -> Any:
    """The fields of a job, whose `servers` say all that they have; what was made whole before stays as it is.

    Raises:
        ValueError: several policies have no room on a server, of which it does not say that it has.
    """
    servers = values.get("servers") if isinstance(values, Mapping) else None
    if not isinstance(servers, Mapping):
        return values
    job = {name: _fields(values[name]) for name in ("base_model", *_SECTIONS) if values.get(name) is not None}
    if isinstance(engine := job.get("engine"), Mapping):
        # It is a matter of who plays on a server, which is another matter on each.
        job["engine"] = {name: value for name, value in engine.items() if name != "max_adapters"}
    agents, arena = values.get("agents"), values.get("arena")
    return {**values, "servers": {name: _whole(name, job, given, agents, arena) for name, given in servers.items()}}


def _whole(name: str, job: Mapping[str, Any], given: Any, agents: Any, arena: Any) -> Any:
    fields = {} if given is None else _fields(given)
    if not isinstance(fields, Mapping):
        return given
    whole = {**job, **fields}
    whole["base_model"] = fields.get("base_model") or job.get("base_model", "")
    for section in ("engine", "trainer"):
        theirs, own = job.get(section), _fields(fields.get(section))
        if isinstance(theirs, Mapping) and isinstance(own, Mapping):
            whole[section] = {**theirs, **own}
    engine = whole.get("engine", {})
    if isinstance(engine, Mapping) and isinstance(agents, Mapping) and "max_adapters" not in engine:
        if (places := places_on(agents, name, arena)) > 1 and whole.get("lora") is None:
            raise ValueError(no_room(places, name))
        whole["engine"] = {**engine, "max_adapters": max(1, places)}
    resources = whole.get("resources")
    return with_whole_gpu(whole) if isinstance(resources, Mapping) and resources.get("layout") == "split" else whole


def _fields(value: Any) -> Any:
    """What was said of a section that may be a config already."""
    if not isinstance(value, BaseModel):
        return value
    return {name: _fields(getattr(value, name)) for name in value.model_fields_set}


def policies_on(agents: Mapping[str, Any], server: str) -> int:
    """How many agents, validated or not, have policies of their own on a server; "" is the job's own."""

    def there(agent: Any) -> bool:
        fields = _fields(agent)
        return ((fields.get("server") or "") if isinstance(fields, Mapping) else "") == server

    return sum(not bound_elsewhere(agent) and there(agent) for agent in agents.values())


def places_on(agents: Mapping[str, Any], server: str, arena: Any = None) -> int:
    """How many policies a server has to have room for: those of agents, of pools and of an arena, validated or not."""
    return policies_on(agents, server) + _slots_on(agents, server) + _past_on(arena, agents, server)


def _slots_on(agents: Mapping[str, Any], server: str) -> int:
    """Of pools: past versions are where the agent is that they are of."""

    def there(agent: Any) -> bool:
        pool = _fields(_mapping(_fields(agent)).get("pool"))
        of = _mapping(pool).get("of", "")
        learner = _mapping(_fields(agents.get(of))) if isinstance(of, str) else {}
        return bool(pool) and (learner.get("server") or "") == server

    return sum(places_of_pool(agent) for agent in agents.values() if there(agent))


def _past_on(arena: Any, agents: Mapping[str, Any], server: str) -> int:
    here = {name: agent for name, agent in agents.items() if (_mapping(_fields(agent)).get("server") or "") == server}
    return places_of_arena(arena, here)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def no_room(policies: int, server: str) -> str:
    """Why several policies cannot be on a server that trains the full parameters."""
    on, at = (f" on server '{server}'", f"servers.{server}.") if server else ("", "")
    return f"agents: {policies} policies share one base model{on}, so they are adapters; set {at}lora, or give each a server"


def check_servers(
    own: FurtherServerConfig, servers: Mapping[str, FurtherServerConfig], agents: Mapping[str, AgentConfig]
) -> None:
    """Whether every agent's policy has a place on its server, and every server an agent. `own` is the job's.

    Raises:
        ValueError: not so; it names the agent or the server.
    """
    names = {"": own, **servers}
    for name, agent in agents.items():
        if agent.server not in names:
            there = f"there are {', '.join(servers)}" if servers else "the job has none beside its own"
            raise ValueError(f"agents.{name}.server: no server '{agent.server}' in servers; {there}")
    for server, config in names.items():
        if config.critic is not None:
            raise ValueError(f"servers.{server}.critic has no meaning: the algorithms of agents say who has a critic")
        here = [name for name, agent in agents.items() if agent.server == server and not bound_elsewhere(agent)]
        here.sort(key=lambda name: not agents[name].learns)
        _check_policies(server, config, {name: agents[name] for name in here})


def _check_policies(server: str, config: FurtherServerConfig, agents: Mapping[str, AgentConfig]) -> None:
    """The first of the agents has the policy that the server begins with."""
    at, what = (f"servers.{server}.", f"server '{server}'") if server else ("", "the job's own server")
    if not agents and server:
        raise ValueError(f"servers.{server}: no agent has a policy there; agents.NAME.server: {server} gives it one")
    if not agents:
        raise ValueError("agents: none has a policy on the job's own server; leave out the server of one")
    first, *others = agents
    if config.lora is None and others:
        raise ValueError(no_room(len(agents), server))
    if config.lora is None and agents[first].lora is not None:
        raise ValueError(f"agents.{first}.lora: {what} trains full parameters; set {at}lora")
    if agents[first].lora not in (None, config.lora):
        whose = "the job's own policy, so that its adapter is the job's" if not server else f"the first policy of {what}"
        raise ValueError(f"agents.{first} has {whose}: set {at}lora")
    for name in others:
        lora = agents[name].lora
        if lora is not None and config.lora is not None and lora.rank > config.lora.rank:
            raise ValueError(f"agents.{name}.lora.rank is above {at}lora.rank, the largest for which the server makes room")


def check_places(
    own: FurtherServerConfig, servers: Mapping[str, FurtherServerConfig], agents: Mapping[str, AgentConfig], arena: Any
) -> None:
    """Whether every server has room for the policies of agents, of pools and of the arena. `own` is the job's.

    Raises:
        ValueError: not so.
    """
    for server, config in {"": own, **servers}.items():
        at, there = (f"servers.{server}.", f" on server '{server}'") if server else ("", "")
        policies, slots, past = policies_on(agents, server), _slots_on(agents, server), _past_on(arena, agents, server)
        room = config.engine.max_adapters
        if config.lora is None and policies + slots + past > 1:
            raise ValueError(no_room(policies + slots + past, server))
        if policies + slots > room:
            what = f"{policies} policies" + (f" and pools {slots} slots" if slots else "")
            raise ValueError(f"agents have {what}{there}, and {at}engine.max_adapters is {room}")
        if policies + slots + past > room:
            raise ValueError(
                f"arena.past={arena and arena.past} plays past versions{there}, {past} at a time, and "
                f"{at}engine.max_adapters={room} has room for the {policies + slots} policies of agents only"
            )


def server_words(config: Mapping[str, Any], name: str) -> str:
    """What a server of a job with several is called, with the agents whose policies it has; "" for a job with one. `config` are
    the fields of the job's."""
    if not config.get("servers"):
        return ""
    agents = config.get("agents") or {}
    here = ", ".join(agent for agent in agents if policies_on({agent: agents[agent]}, name))
    return (f"server '{name}'" if name else "the job's own server") + (f" ({here})" if here else "")


def part_error(name: str, error: ConfigError) -> ValueError:
    """What is wrong with a server beside the job's own, in the words for one of its own."""
    detail = error.detail.removeprefix("config: ").removeprefix("Value error, ")
    return ValueError(f"servers.{name}: {detail}")
