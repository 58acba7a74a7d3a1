"""Servers beside a job's own: what they inherit, and what cannot be."""

from typing import Any

import pytest

from opentinker.config.job import JobConfig, RLJobConfig, parse_job
from opentinker.config.servers import server_words
from opentinker.errors import ConfigError

BASE: dict[str, Any] = {
    "kind": "rl",
    "base_model": "small",
    "lora": {"rank": 4},
    "engine": {"kind": "transformers", "max_model_len": 256},
    "environment": {"name": "gomoku_duel"},
    "algorithm": {"group_size": 4},
    "sampling": {"max_tokens": 16},
}
PAIR = {"black": {}, "white": {"server": "second"}}


def job(servers: dict[str, Any], agents: Any = PAIR, **changes: Any) -> RLJobConfig:
    found = parse_job({**BASE, "servers": servers, "agents": agents, **changes})
    assert isinstance(found, RLJobConfig)
    return found


def test_what_a_server_does_not_say_is_the_jobs() -> None:
    second = job({"second": None}).servers["second"]
    assert (second.base_model, second.lora) == ("small", job({"second": None}).lora)
    assert (second.engine.kind, second.engine.max_model_len) == ("transformers", 256)
    other = job({"second": {"base_model": "large", "lora": None, "engine": {"max_model_len": 128}}}).servers["second"]
    assert (other.base_model, other.lora) == ("large", None)
    assert (other.engine.kind, other.engine.max_model_len) == ("transformers", 128)
    split = job({"second": {"resources": {"gpus": 0}}}, resources={"layout": "split"})
    assert split.engine.memory_fraction == 0.9
    assert split.servers["second"].engine.memory_fraction == 0.45, "only where the engine has its GPU to itself"
    assert job({"second": {"resources": {"layout": "split"}}}).servers["second"].engine.memory_fraction == 0.9


def test_a_config_that_was_stored_is_read_as_it_was() -> None:
    config = job({"second": {"lora": None}, "third": {"engine": {"max_model_len": 64}}}, PAIR | {"red": {"server": "third"}})
    assert parse_job(config.model_dump(mode="json")) == config


def test_each_server_has_room_for_the_policies_of_its_agents() -> None:
    agents = {
        "red": {"server": "second", "frozen": True},
        "white": {"server": "second"},
        "black": {},
        "blue": {"policy": "red"},
    }
    config = job({"second": {}}, agents)
    assert (config.engine.max_adapters, config.servers["second"].engine.max_adapters) == (1, 2)
    assert config.policies == ["black", "white", "red"], "by server, and on one those that learn first"


def test_each_server_is_what_a_job_of_its_own_would_be() -> None:
    parts = job({"second": {"base_model": "large", "lora": None}}, training={"seed": 5}).parts
    assert list(parts) == ["", "second"]
    assert (parts["second"].base_model, parts["second"].lora, parts["second"].policy_seed) == ("large", None, 6)
    assert parts["second"].server().base_model == "large"
    assert list(parse_job({"kind": "inference", "base_model": "m"}).parts) == [""]


def test_an_interactive_job_has_servers_without_agents() -> None:
    fields = {"kind": "interactive", "base_model": "m", "lora": {"rank": 2}, "seed": 7, "servers": {"second": {"lora": None}}}
    config: JobConfig = parse_job(fields)
    assert [(name, part.lora is None, part.policy_seed) for name, part in config.parts.items()] == [
        ("", False, 7),
        ("second", True, 8),
    ]
    judged = parse_job(fields | {"servers": {"second": {"critic": {"rank": 3}}}})
    assert [part.policy_critic and part.policy_critic.rank for part in judged.parts.values()] == [None, 3]
    assert parse_job(judged.model_dump(mode="json")) == judged


def test_the_base_model_of_a_policy_that_a_server_did_not_begin_with_is_known_if_all_servers_have_the_same() -> None:
    fields = {"kind": "interactive", "base_model": "m", "lora": {"rank": 2}}
    for second, told in (({}, "m"), ({"base_model": "other"}, None)):
        config = parse_job(fields | {"servers": {"second": second}})
        assert config.model_of_policy("white") == told
        assert config.model_of_policy("second") == second.get("base_model", "m")
    assert parse_job(fields).model_of_policy("white") == "m"
    agents = {"black": {}, "white": {"pool": {"of": "black"}}}
    assert job({}, agents, engine=BASE["engine"] | {"max_adapters": 8}).model_of_policy("white.0") == "small"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"arena": {"past": -1}}, "arena.past: "),
        ({"arena": {"seats": "al"}}, "arena.seats: "),
        ({"arena": {"evry": 3}}, "unknown key 'arena.evry'"),
        ({"arena": [3]}, "arena: "),
        ({"agents": {"black": {}, "white": {"pool": {"of": ["black"]}}}}, "agents.white.pool.of: "),
        ({"agents": {"black": {}, "white": {"pool": {"of": {"agent": "black"}}}}}, "agents.white.pool.of: "),
    ],
)
@pytest.mark.parametrize("servers", [{}, {"second": {}}])
def test_what_is_wrong_with_who_else_needs_room_is_named_whole(change: Any, says: str, servers: Any) -> None:
    fields = {**BASE, "agents": {"black": {}, "white": {}}, "servers": servers} | change
    with pytest.raises(ConfigError, match=f"^{says}"):
        parse_job(fields)


def test_an_agent_that_learns_by_ppo_has_a_critic_on_its_server() -> None:
    ppo = {"kind": "ppo", "group_size": 4, "critic": {"rank": 3}}
    parts = job({"second": {}}, {"black": {}, "white": {"server": "second", "algorithm": ppo}}).parts
    assert [part.policy_critic and part.policy_critic.rank for part in parts.values()] == [None, 3]


RANK_2 = {"black": {}, "white": {"server": "second", "lora": {"rank": 2}}}
TWO = PAIR | {"red": {"server": "second"}}


@pytest.mark.parametrize(
    ("servers", "agents", "words"),
    [
        ({"second": {}}, {"black": {}, "white": {"server": "secnd"}}, "agents.white.server: no server 'secnd' in servers"),
        ({}, PAIR, "agents.white.server: no server 'second' in servers; the job has none beside its own"),
        ({"second": {}}, {"black": {}, "white": {}}, "servers.second: no agent has a policy there"),
        ({"second": {}}, {"black": {"server": "second"}, "white": {"server": "second"}}, "none has a policy on the job's own"),
        ({"second": {"lora": None}}, TWO, "2 policies share one base model on server 'second', so they are adapters"),
        (
            {"second": {"lora": None}},
            {"black": {}, "white": {"server": "second", "lora": {"rank": 2}}},
            "trains full parameters",
        ),
        ({"second": {}}, RANK_2, "set servers.second.lora"),
        (
            {"second": {}},
            TWO | {"red": {"server": "second", "lora": {"rank": 8}}},
            "agents.red.lora.rank is above",
        ),
        (
            {"second": {"engine": {"max_adapters": 1}}},
            TWO,
            "and servers.second.engine.max_adapters is 1",
        ),
        ({"second": {}}, {"black": {}, "white": {"server": "second", "policy": "black"}}, "server has no meaning: 'black'"),
        (
            {"second": {"engine": {"max_model_len": 16}}},
            PAIR,
            r"in servers.second.engine.max_model_len \(16\)",
        ),
        ({"second": {"engine": {"tensor_parallel": 2}}}, PAIR, "servers.second.engine.*needs kind 'vllm'"),
        (
            {"second": {"trainer": {"ranks": 2}, "resources": {"gpus": 1}}},
            PAIR,
            "servers.second: trainer.ranks=2 needs",
        ),
        ({"second": {"critic": {"rank": 2}}}, PAIR, "servers.second.critic has no meaning"),
        ({"second": {"enginee": {}}}, PAIR, "unknown key 'servers.second.enginee'"),
        ({"a b": {}}, {"black": {}, "white": {"server": "a b"}}, "'a b' cannot be a server's name"),
        ({f"s{i}": {} for i in range(16)}, PAIR, "servers: .* at most 15"),
        ({"second": {}}, None, "servers are for several agents, and there are no agents"),
    ],
)
def test_what_cannot_be_is_refused_and_named(servers: dict[str, Any], agents: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        job(servers, agents or {})


def test_a_server_is_called_by_its_name_and_its_agents() -> None:
    config = job({"second": {}}, TWO | {"blue": {"policy": "black"}}).model_dump(mode="json")
    assert server_words(config, "second") == "server 'second' (white, red)"
    assert server_words(config, "") == "the job's own server (black)"
    assert server_words({"base_model": "m"}, "") == ""
