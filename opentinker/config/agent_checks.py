"""Whether the sections of a job of several agents agree: who plays, on which server, by which algorithm, and where drivers
meet. Each function raises a ValueError that names the key, and says what would do."""

from collections.abc import Mapping, Sequence

from opentinker.config.agents import AgentConfig, TurnsConfig, bound_elsewhere
from opentinker.config.algorithms import AlgorithmConfig
from opentinker.config.arena import ArenaConfig
from opentinker.config.coordination import CoordinatorConfig
from opentinker.config.places import no_room, past_on, policies_on, slots_on
from opentinker.config.rollout import SamplingConfig
from opentinker.config.server import EngineConfig
from opentinker.config.servers import FurtherServerConfig


def check_one_agent(
    turns: TurnsConfig,
    coordinator: CoordinatorConfig | None,
    arena: ArenaConfig | None,
    servers: Mapping[str, FurtherServerConfig],
) -> None:
    """A job without `agents` has none of the sections that are for several."""
    if turns != TurnsConfig():
        raise ValueError("turns are those of several agents, and there are no agents")
    if coordinator is not None:
        raise ValueError("coordinator is for agents, and there are none; name those that this job drives")
    if arena is not None:
        raise ValueError("arena is for several agents, and there are no agents")
    if servers:
        raise ValueError("servers are for several agents, and there are no agents")


def check_servers(
    own: FurtherServerConfig, servers: Mapping[str, FurtherServerConfig], agents: Mapping[str, AgentConfig]
) -> None:
    """Whether every agent's policy has a place on its server, and every server an agent. `own` is the job's."""
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
    own: FurtherServerConfig,
    servers: Mapping[str, FurtherServerConfig],
    agents: Mapping[str, AgentConfig],
    arena: ArenaConfig | None,
) -> None:
    """Whether every server has room for the policies of agents, of pools and of the arena. `own` is the job's."""
    for server, config in {"": own, **servers}.items():
        at, there = (f"servers.{server}.", f" on server '{server}'") if server else ("", "")
        policies, slots, past = policies_on(agents, server), slots_on(agents, server), past_on(arena, agents, server)
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


def check_players(agents: Mapping[str, AgentConfig], policies: Sequence[str], learners: Sequence[str]) -> None:
    """Whether an agent whose seat another's policy plays, or a pool of another's past versions, names one that has them.
    `policies` are the agents with policies of their own, `learners` those of them that learn."""
    for name, agent in agents.items():
        if agent.policy and agent.policy not in policies:
            what = "plays itself" if agent.policy == name else "is no agent with a policy of its own"
            raise ValueError(f"agents.{name}.policy: '{agent.policy}' {what}; those are {', '.join(policies)}")
    for name, pool in ((name, agent.pool) for name, agent in agents.items() if agent.pool):
        if pool.of not in learners:
            what = "plays itself" if pool.of == name else "is no agent that learns"
            raise ValueError(f"agents.{name}.pool.of: '{pool.of}' {what}; those are {', '.join(learners)}")


def check_algorithms(algorithms: Mapping[str, AlgorithmConfig]) -> None:
    """Whether the agents that learn can play the same episodes. `algorithms` are theirs."""
    if len({algorithm.group_size for algorithm in algorithms.values()}) > 1:
        sizes = ", ".join(f"{name} {algorithm.group_size}" for name, algorithm in algorithms.items())
        raise ValueError(f"agents play the same episodes, so their algorithms need the same group_size, not {sizes}")


def check_meeting(
    meeting: CoordinatorConfig, environment: str, arena: ArenaConfig | None, algorithms: Mapping[str, AlgorithmConfig]
) -> None:
    """Whether the agents of this job can play with those that other processes drive. `environment` is its name."""
    if not (meeting.url or "://" in environment):
        raise ValueError("coordinator.url is missing: the environment server where the drivers meet")
    if arena is not None:
        raise ValueError("arena needs all agents in one process; with a coordinator, compare the checkpoints after the run")
    if resampling := [name for name, algorithm in algorithms.items() if algorithm.max_resamples]:
        raise ValueError(
            f"agents.{resampling[0]}: algorithm.max_resamples must be 0 with a coordinator: all drivers play the same games"
        )


def check_judged(judged: str, agents: Mapping[str, AgentConfig]) -> None:
    """Whether a policy plays the agent by which evaluations judge; "" = none is named."""
    played = [name for name, agent in agents.items() if not agent.elsewhere]
    if judged and judged not in played:
        there = f"policies play {', '.join(played)}" if played else "this job has no agents"
        raise ValueError(f"evaluation.agent: '{judged}' is no agent that a policy plays; {there}")


def check_room_to_answer(
    engine: EngineConfig,
    sampling: SamplingConfig,
    servers: Mapping[str, FurtherServerConfig],
    agents: Mapping[str, AgentConfig],
) -> None:
    """Whether an action leaves room for a prompt, of the job and of each agent that says otherwise or is elsewhere."""
    contexts = {"": engine, **{f"servers.{name}.": server.engine for name, server in servers.items()}}
    asked = [("", sampling, "")]
    for name, agent in agents.items():
        if agent.sampling is not None or agent.server:
            where = f"agents.{name}." if agent.sampling else ""
            asked.append((where, agent.sampling or sampling, f"servers.{agent.server}." if agent.server else ""))
    for where, said, server in asked:
        if said.max_tokens >= contexts[server].max_model_len:
            raise ValueError(
                f"{where}sampling.max_tokens ({said.max_tokens}) leaves no room for a prompt in "
                f"{server}engine.max_model_len ({contexts[server].max_model_len})"
            )
