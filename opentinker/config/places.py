"""How many policies each server of a job has to have room for: those of agents, and past versions, of pools and of an arena.
All of it is also asked of configs that are not validated yet: the default of `engine.max_adapters` follows from it."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from opentinker.config.agents import bound_elsewhere, fields_of
from opentinker.config.arena import ArenaConfig
from opentinker.config.opponents import PoolConfig
from opentinker.config.server import EngineConfig


def policies_on(agents: Mapping[str, Any], server: str) -> int:
    """How many agents have policies of their own on a server; "" is the job's own."""
    return sum(not bound_elsewhere(agent) for agent in _agents_on(agents, server))


def slots_on(agents: Mapping[str, Any], server: str) -> int:
    """How many past versions of pools are on a server at a time: each is where the agent is that it is a version of."""

    def there(pool: Any) -> bool:
        of = fields_of(pool).get("of", "")
        return isinstance(of, str) and _server_of(agents.get(of)) == server

    pools = [fields_of(agent).get("pool") for agent in agents.values()]
    return sum(_places_of_pool(pool) for pool in pools if pool and there(pool))


def past_on(arena: Any, agents: Mapping[str, Any], server: str) -> int:
    """How many past versions that meet in an arena are on a server at a time; 0 if there is no arena, or a wrong one."""
    if arena is None:
        return 0
    try:
        found = ArenaConfig.model_validate(arena)
    except ValidationError:
        return 0
    fields = [fields_of(agent) for agent in _agents_on(agents, server) if not bound_elsewhere(agent)]
    learners = [agent for agent in fields if not (agent.get("frozen") or agent.get("checkpoint"))]
    if not found.past or not learners:
        return 0
    return 1 if found.seats == "all" else len(learners)


def places_on(agents: Mapping[str, Any], server: str, arena: Any = None) -> int:
    """How many policies a server has to have room for, all together."""
    return policies_on(agents, server) + slots_on(agents, server) + past_on(arena, agents, server)


def with_room(fields: Mapping[str, Any], server: str, agents: Any, arena: Any) -> Mapping[str, Any]:
    """The fields of a server, with room for all policies that it has to have, where they do not say for how many.

    Raises:
        ValueError: there are several, and the server trains the full parameters.
    """
    engine = fields.get("engine", {})
    if isinstance(engine, EngineConfig):
        engine = engine.model_dump(include=engine.model_fields_set)
    if not isinstance(engine, Mapping) or not isinstance(agents, Mapping) or "max_adapters" in engine:
        return fields
    places = places_on(agents, server, arena)
    if places > 1 and fields.get("lora") is None:
        raise ValueError(no_room(places, server))
    return {**fields, "engine": {**engine, "max_adapters": max(places, 1)}}


def no_room(policies: int, server: str) -> str:
    """Why several policies cannot be on a server that trains the full parameters."""
    on, at = (f" on server '{server}'", f"servers.{server}.") if server else ("", "")
    return f"agents: {policies} policies share one base model{on}, so they are adapters; set {at}lora, or give each a server"


def _agents_on(agents: Mapping[str, Any], server: str) -> list[Any]:
    return [agent for agent in agents.values() if _server_of(agent) == server]


def _server_of(agent: Any) -> Any:
    return fields_of(agent).get("server") or ""


def _places_of_pool(pool: Any) -> int:
    """0 for one that is not valid."""
    if isinstance(pool, PoolConfig):
        return pool.places
    try:
        return PoolConfig.model_validate(pool).places
    except ValidationError:
        return 0
