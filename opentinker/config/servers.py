"""The configs of the servers that a job has beside its own. They are made whole when a config is read: what one does not say is
the job's, so that the stored config says of each what it has."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field

from opentinker.config.base import Config
from opentinker.config.places import policies_on, with_room
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
    roomy = with_room(whole, name, agents, arena)
    resources = whole.get("resources")
    return with_whole_gpu(roomy) if isinstance(resources, Mapping) and resources.get("layout") == "split" else roomy


def _fields(value: Any) -> Any:
    """What was said of a section that may be a config already."""
    if not isinstance(value, BaseModel):
        return value
    return {name: _fields(getattr(value, name)) for name in value.model_fields_set}


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
