"""The configs of a job. A YAML file, a Python call and the scheduler's store all hold the same fields."""

from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from opentinker.config.agent_checks import (
    check_algorithms,
    check_judged,
    check_meeting,
    check_one_agent,
    check_places,
    check_players,
    check_room_to_answer,
    check_servers,
)
from opentinker.config.agents import Address, AgentConfig, TurnsConfig
from opentinker.config.algorithms import AlgorithmConfig, GRPOConfig, PolicyGradient, PPOConfig
from opentinker.config.arena import ArenaConfig
from opentinker.config.base import Config, nearest, parse_config
from opentinker.config.coordination import CoordinatorConfig
from opentinker.config.layout_checks import check_layout
from opentinker.config.places import with_room
from opentinker.config.preference import (
    BradleyTerryConfig,
    DPOConfig,
    PreferenceDataConfig,
    PreferenceEvaluationConfig,
    PreferenceLoss,
    PreferenceTrainingConfig,
)
from opentinker.config.requirements import check_variables
from opentinker.config.resources import Resources, Scheduling
from opentinker.config.rl import EvaluationConfig, RLTrainingConfig
from opentinker.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from opentinker.config.server import (
    Dtype,
    EngineConfig,
    LoraConfig,
    ServerConfig,
    TrainerConfig,
    training_server,
    with_whole_gpu,
)
from opentinker.config.servers import (
    FurtherServerConfig,
    Servers,
    part_error,
    whole_servers,
)
from opentinker.config.sft import ChatDataConfig, SFTEvaluationConfig, SFTTrainingConfig
from opentinker.config.sinks import Sinks, secrets_of
from opentinker.errors import ConfigError


class JobConfig(Config):
    """What jobs of every kind have: a server, and a place in the queue. Subclasses are the kinds."""

    driven: ClassVar[bool] = False
    """The cluster runs a driver for it; otherwise whoever has its token uses its server."""
    trains: ClassVar[bool] = True
    """Its server has a trainer, so that there is something to save."""

    kind: str
    name: str = ""
    """Shown by `opentinker ps`; free text."""
    base_model: str
    """A known model name (`smollm2-135m`), or a directory with a Hugging Face model on the cluster."""
    lora: LoraConfig | None = None
    """An adapter to train; None trains the full parameters."""
    start_from: str = ""
    """A checkpoint whose weights the policy starts from, as `user/job/name@version`; `user/` and `@version` may be left out.
    Its base model has to be this job's, and its adapter, too, if the job trains; the optimizer starts anew."""
    engine: EngineConfig = EngineConfig()
    resources: Resources = Resources()
    scheduling: Scheduling = Scheduling()

    @model_validator(mode="after")
    def _can_restart(self) -> "JobConfig":
        if self.scheduling.max_restarts and self.leased:
            raise ValueError(
                "scheduling.max_restarts is for jobs that the cluster drives: here the client has to go on, from a checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _only_adapters_share(self) -> "JobConfig":
        if self.engine.max_adapters > 1 and self.lora is None:
            raise ValueError(
                f"engine.max_adapters={self.engine.max_adapters} is for adapters, and this job has no lora: full parameters "
                "need the server to themselves"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _split_engine_has_the_gpu(cls, values: Any) -> Any:
        """The default of `engine.memory_fraction` leaves room for a trainer, which in the split layout is elsewhere."""
        resources = values.get("resources", {}) if isinstance(values, Mapping) else None
        layout = (
            resources.layout if isinstance(resources, Resources) else isinstance(resources, Mapping) and resources.get("layout")
        )
        return with_whole_gpu(values) if layout == "split" else values

    @model_validator(mode="after")
    def _layout_fits(self) -> "JobConfig":
        check_layout(self.kind, self.engine, self.resources, trains=self.trains, trainer_ranks=self.trainer_ranks)
        return self

    @model_validator(mode="after")
    def _parts_fit(self) -> "JobConfig":
        _ = self.parts
        return self

    @property
    def further_servers(self) -> Mapping[str, FurtherServerConfig]:
        """Those beside its own, by name."""
        return {}

    def critic_on(self, server: str) -> LoraConfig | None:
        """The adapter of the critic beside the policy that a server beside the job's own begins with."""
        return None

    def first_policy(self, server: str) -> str:
        """What the policy is called that a server beside the job's own begins with; no two of a job have the same name."""
        return server

    @property
    def parts(self) -> "dict[str, JobConfig]":
        """Of each of its servers, what a job would be that had this one alone; the first, "", is its own.

        Raises:
            ValueError: one of them could not be.
        """
        parts: dict[str, JobConfig] = {"": self}
        for place, (name, server) in enumerate(self.further_servers.items(), 1):
            fields = {field: getattr(server, field) for field in type(server).model_fields}
            fields |= {"seed": self.policy_seed + place, "critic": self.critic_on(name)}
            try:
                parts[name] = parse_config(InteractiveJobConfig, fields)
            except ConfigError as error:
                raise part_error(name, error) from error
        return parts

    @property
    def starts(self) -> dict[tuple[str, ...], str]:
        """The checkpoints that this config names, by the keys that lead to where it does."""
        return {("start_from",): self.start_from} if self.start_from else {}

    def lora_of_start(self, where: tuple[str, ...]) -> LoraConfig | Literal["any"] | None:
        """The adapter that the checkpoint named there has to have; 'any' = that is known only when it is loaded."""
        return self.lora

    def kinds_for_start(self, where: tuple[str, ...], model: str | None) -> Collection[str]:
        """Of which kinds, 'full' and 'lora', a checkpoint named there may be; its base model is None if that is not known."""
        return {_kind(self.lora_of_start(where) is not None)}

    def models_for_start(self, where: tuple[str, ...]) -> Collection[str]:
        """The base models of which a checkpoint named there may be."""
        return {self.base_model}

    @property
    def own_policy(self) -> str | None:
        """The agent that has the job's own policy; None where there are no agents."""
        return None

    def model_of_policy(self, policy: str | None) -> str | None:
        """The base model of its own policy (None) or of a further one; None if that is not known."""
        return self.base_model

    def lora_of_policy(self, policy: str | None) -> LoraConfig | Literal["any"] | None:
        """The adapter of this job's own policy (None), or of a further one."""
        return self.lora if policy is None else "any"

    @property
    def _only_model(self) -> str | None:
        """The base model that all of its servers have; None if they differ."""
        models = {self.base_model, *(server.base_model for server in self.further_servers.values())}
        return self.base_model if len(models) == 1 else None

    @property
    def trainer_ranks(self) -> int:
        """Processes of its trainer."""
        trainer = self.server().trainer
        return 1 if trainer is None else trainer.ranks

    @property
    def leased(self) -> bool:
        """It ends when its client stops to send heartbeats."""
        return False

    @property
    def policy_seed(self) -> int:
        """Of the adapter's initialisation."""
        return 0

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        """'scalar' for a reward model."""
        return "lm"

    @property
    def policy_critic(self) -> LoraConfig | None:
        """The adapter of the policy's critic, if it has one."""
        return None

    def default_name(self) -> str:
        """What it is called if its user gave it no name."""
        return PurePath(self.base_model).name or self.base_model

    @abstractmethod
    def server(self) -> ServerConfig:
        """What hosts it."""


class TrainingJobConfig(JobConfig):
    """What jobs have whose policies learn."""

    trainer: TrainerConfig = TrainerConfig()

    def server(self) -> ServerConfig:
        return training_server(self.base_model, self.engine, self.trainer)


class RLJobConfig(TrainingJobConfig):
    """A reinforcement-learning job."""

    driven: ClassVar[bool] = True

    kind: Literal["rl"] = "rl"
    environment: EnvironmentConfig
    algorithm: AlgorithmConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: RLTrainingConfig = RLTrainingConfig()
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Who plays which seat, for an environment of several agents: all of them learn in this one job."""
    turns: TurnsConfig = TurnsConfig()
    """With `agents`: what becomes of one that holds up the others."""
    coordinator: CoordinatorConfig | None = None
    """With `agents`: those that are not named here are driven by other processes, which meet at this environment server."""
    arena: ArenaConfig | None = None
    """With `agents`: they meet each other, past versions and reference players; None = they do not."""
    servers: Servers = Field(default_factory=dict)
    """With `agents`: servers beside the job's own, by name, for those whose policies need another base model, or a server for
    themselves. All of a job's servers start together or not at all."""
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @model_validator(mode="before")
    @classmethod
    def _room_for_agents(cls, values: Any) -> Any:
        """Where nothing is said of it, the server has room for the adapters of all agents. `white:` in YAML is `white: {}`."""
        if not isinstance(values, Mapping):
            return values
        agents = values.get("agents")
        if isinstance(agents, Mapping):
            agents = {name: {} if agent is None else agent for name, agent in agents.items()}
            values = {**values, "agents": agents}
        return with_room(values, "", agents, values.get("arena"))

    @model_validator(mode="before")
    @classmethod
    def _servers_are_whole(cls, values: Any) -> Any:
        """Runs before the one above, which looks at what the user wrote of the job's own server."""
        return whole_servers(values)

    @model_validator(mode="after")
    def _agents_can_play(self) -> "RLJobConfig":
        if not self.agents:
            check_one_agent(self.turns, self.coordinator, self.arena, self.servers)
            return self
        if not any(agent.learns for agent in self.agents.values()):
            raise ValueError("agents: nobody learns; one needs a policy of its own that is not frozen")
        check_servers(self._as_server, self.servers, self.agents)
        check_players(self.agents, self.policies, self.learners)
        check_places(self._as_server, self.servers, self.agents, self.arena)
        algorithms = {name: self.algorithm_of(name) for name in self.learners}
        check_algorithms(algorithms)
        if self.coordinator is not None:
            check_meeting(self.coordinator, self.environment.name, self.arena, algorithms)
        elif self.turns.on_lost != "fail":
            raise ValueError("turns.on_lost says what becomes of a run of several drivers, and there is no coordinator")
        if self.start_from:
            raise ValueError("start_from is for a job of one agent; agents have one each")
        check_variables(
            {f"agents.{name}.model": agent.model.secrets() for name, agent in self.agents.items() if agent.model}
            | {"environment": self.environment.secrets, "sinks": secrets_of(self.sinks)}
        )
        return self

    @model_validator(mode="after")
    def _an_agent_is_judged(self) -> "RLJobConfig":
        check_judged(self.evaluation.agent, self.agents)
        return self

    @model_validator(mode="after")
    def _action_fits_context(self) -> "RLJobConfig":
        check_room_to_answer(self.engine, self.sampling, self.servers, self.agents)
        return self

    @model_validator(mode="after")
    def _limits_are_measured(self) -> "RLJobConfig":
        kls = [self.algorithm_of(name).kl for name in self.learners] if self.agents else [self.algorithm.kl]
        if self.training.stop.max_reference_kl is not None and not any(kl.measured for kl in kls):
            raise ValueError("training.stop.max_reference_kl needs algorithm.kl.coefficient above 0, or algorithm.kl.measure")
        return self

    @model_validator(mode="after")
    def _scores_are_seen(self) -> "RLJobConfig":
        stop = self.training.stop
        if stop.counted and stop.score == "evaluation" and not self.evaluation.every:
            raise ValueError(
                f"training.stop.{stop.counted} counts evaluations, and there are none between steps: set evaluation.every, or "
                "training.stop.score to 'training'"
            )
        judged = self.evaluation.agent
        if stop.counted and stop.score == "training" and judged and judged not in self.learners:
            raise ValueError(
                f"training.stop.score 'training' goes by the training of evaluation.agent, and '{judged}' has no policy of its "
                f"own that learns; name one of {', '.join(self.learners)}"
            )
        return self

    @property
    def policies(self) -> list[str]:
        """The agents with policies of their own, server by server, the job's own first. The first on a server, one that learns
        if there is any, has the policy that the server begins with."""
        own = [name for name, agent in self.agents.items() if not (agent.policy or agent.elsewhere)]
        place = {server: place for place, server in enumerate(["", *self.servers])}
        # Servers that are not there are refused elsewhere, in words.
        order = {name: place.get(self.agents[name].server, len(place)) for name in own}
        return sorted(own, key=lambda name: (order[name], not self.agents[name].learns))

    @property
    def learners(self) -> list[str]:
        """The agents whose own policies learn."""
        return [name for name in self.policies if self.agents[name].learns]

    def server_of(self, agent: str) -> FurtherServerConfig:
        """What has the policy of an agent."""
        server = self.agents[agent].server
        return self.servers[server] if server else self._as_server

    def lora_of(self, agent: str) -> LoraConfig | None:
        """The adapter of an agent's policy; None: its full parameters."""
        return self.agents[agent].lora or self.server_of(agent).lora

    def algorithm_of(self, agent: str) -> AlgorithmConfig:
        """How an agent's own policy learns."""
        return self.agents[agent].algorithm or self.algorithm

    def critic_of(self, agent: str) -> LoraConfig | None:
        """The adapter of the critic beside an agent's own policy, if it has one."""
        return _critic(self.algorithm_of(agent)) if agent in self.learners else None

    @property
    def secrets(self) -> dict[str, str]:
        """Environment variable of the driver -> name of a secret of the job's owner."""
        models = [agent.model.secrets() for agent in self.agents.values() if agent.model]
        return {
            variable: name
            for found in (secrets_of(self.sinks), *models, self.environment.secrets)
            for variable, name in found.items()
        }

    @property
    def _as_server(self) -> FurtherServerConfig:
        return FurtherServerConfig(
            base_model=self.base_model, lora=self.lora, engine=self.engine, trainer=self.trainer, resources=self.resources
        )

    @property
    def own_policy(self) -> str | None:
        return self.policies[0] if self.agents else None

    @property
    def starts(self) -> dict[tuple[str, ...], str]:
        named = {
            ("agents", name, field): address
            for name, agent in self.agents.items()
            for field, address in (("checkpoint", agent.checkpoint), ("start_from", agent.start_from))
            if address
        }
        return super().starts | named

    def lora_of_start(self, where: tuple[str, ...]) -> LoraConfig | Literal["any"] | None:
        return self.lora_of_policy(where[1]) if where[0] == "agents" else self.lora

    def lora_of_policy(self, policy: str | None) -> LoraConfig | Literal["any"] | None:
        if policy is None:
            return self.lora
        return self.lora_of(policy) if policy in self.agents else "any"

    def models_for_start(self, where: tuple[str, ...]) -> Collection[str]:
        return {self.server_of(where[1]).base_model if where[0] == "agents" else self.base_model}

    def model_of_policy(self, policy: str | None) -> str | None:
        if policy is None:
            return self.base_model
        return self.server_of(policy).base_model if policy in self.agents else self._only_model

    def critic_on(self, server: str) -> LoraConfig | None:
        first = self.first_policy(server)
        return self.critic_of(first) if first else None

    def first_policy(self, server: str) -> str:
        return next((name for name in self.policies if self.agents[name].server == server), "")

    @property
    def further_servers(self) -> Mapping[str, FurtherServerConfig]:
        return self.servers

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    @property
    def policy_critic(self) -> LoraConfig | None:
        return self.critic_of(self.policies[0]) if self.agents else _critic(self.algorithm)

    def default_name(self) -> str:
        name = self.environment.name
        return name.partition("//")[2].partition(",")[0] if name.startswith("http") else name.rpartition(":")[2]


class SFTJobConfig(TrainingJobConfig):
    """Supervised fine-tuning on conversations."""

    driven: ClassVar[bool] = True

    kind: Literal["sft"] = "sft"
    data: ChatDataConfig
    evaluation: SFTEvaluationConfig = SFTEvaluationConfig()
    training: SFTTrainingConfig = SFTTrainingConfig()
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    def default_name(self) -> str:
        return PurePath(self.data.train.name).stem


class PreferenceJobConfig(TrainingJobConfig):
    """Preference training on pairs of answers: a policy (DPO, IPO) or a reward model."""

    driven: ClassVar[bool] = True

    kind: Literal["preference"] = "preference"
    data: PreferenceDataConfig
    loss: PreferenceLoss = DPOConfig()
    evaluation: PreferenceEvaluationConfig = PreferenceEvaluationConfig()
    training: PreferenceTrainingConfig = PreferenceTrainingConfig()
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        return "scalar" if isinstance(self.loss, BradleyTerryConfig) else "lm"

    def default_name(self) -> str:
        return PurePath(self.data.train.name).stem


class InteractiveJobConfig(TrainingJobConfig):
    """A job whose driver runs in the user's process: only what the cluster must host."""

    kind: Literal["interactive"] = "interactive"
    head: Literal["lm", "scalar"] = "lm"
    """'scalar' makes the policy a reward model, which scores and cannot be sampled."""
    critic: LoraConfig | None = None
    """The adapter of a critic beside the policy, for PPO; None = no critic."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Tasks, samples and adapter initialisation derive from it."""
    checkpoints: Annotated[tuple[Address, ...], Field(max_length=100)] = ()
    """Further checkpoints whose weights policies of this job may take (`PolicyClient.load_weights`), by their addresses, as in
    `start_from`; such as those that agents of a `MultiAgentTrainer` begin with."""

    servers: Servers = Field(default_factory=dict)
    """Servers beside the job's own, by name, each with a policy of its own. All of them start together or not at all."""

    @model_validator(mode="before")
    @classmethod
    def _servers_are_whole(cls, values: Any) -> Any:
        return whole_servers(values)

    @property
    def starts(self) -> dict[tuple[str, ...], str]:
        return super().starts | {("checkpoints", str(place)): address for place, address in enumerate(self.checkpoints)}

    def lora_of_start(self, where: tuple[str, ...]) -> LoraConfig | Literal["any"] | None:
        return "any" if where[0] == "checkpoints" else self.lora

    def kinds_for_start(self, where: tuple[str, ...], model: str | None) -> Collection[str]:
        if where[0] != "checkpoints":
            return super().kinds_for_start(where, model)
        return {_kind(part.lora is not None) for part in self.parts.values() if model in (None, part.base_model)}

    def models_for_start(self, where: tuple[str, ...]) -> Collection[str]:
        return {self.base_model, *(server.base_model for server in self.servers.values())}

    def model_of_policy(self, policy: str | None) -> str | None:
        if policy is None:
            return self.base_model
        return self.servers[policy].base_model if policy in self.servers else self._only_model

    @model_validator(mode="after")
    def _critic_judges_actions(self) -> "InteractiveJobConfig":
        if self.critic is not None and self.head == "scalar":
            raise ValueError("a policy with head 'scalar' takes no actions that a critic could judge")
        return self

    @property
    def further_servers(self) -> Mapping[str, FurtherServerConfig]:
        return self.servers

    def critic_on(self, server: str) -> LoraConfig | None:
        return self.servers[server].critic

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        return self.head

    @property
    def policy_critic(self) -> LoraConfig | None:
        return self.critic

    @property
    def leased(self) -> bool:
        return True

    @property
    def policy_seed(self) -> int:
        return self.seed


class InferenceJobConfig(JobConfig):
    """A model to sample from: an engine without a trainer. It runs until it is ended, or until one of its limits."""

    trains: ClassVar[bool] = False

    kind: Literal["inference"] = "inference"
    lora: None = None
    """Not for this kind: a checkpoint brings its adapter along."""
    dtype: Dtype = "bfloat16"
    """Type of weights and activations."""
    lease: bool = False
    """It ends when its client stops to send heartbeats, as an interactive job does."""

    @model_validator(mode="before")
    @classmethod
    def _engine_has_the_gpu(cls, values: Any) -> Any:
        """The default of `engine.memory_fraction` leaves room for a trainer, which is not there."""
        return with_whole_gpu(values)

    @property
    def leased(self) -> bool:
        return self.lease

    def server(self) -> ServerConfig:
        return ServerConfig(base_model=self.base_model, engine=self.engine, dtype=self.dtype)


def _kind(adapter: bool) -> str:
    """What the checkpoints of a policy are called."""
    return "lora" if adapter else "full"


def _critic(algorithm: PolicyGradient) -> LoraConfig | None:
    if not isinstance(algorithm, PPOConfig):
        return None
    return LoraConfig(rank=algorithm.critic.rank, alpha=algorithm.critic.alpha)


KINDS: Mapping[str, type[JobConfig]] = {
    "rl": RLJobConfig,
    "sft": SFTJobConfig,
    "preference": PreferenceJobConfig,
    "interactive": InteractiveJobConfig,
    "inference": InferenceJobConfig,
}
"""Every kind of job there is."""


def parse_job(values: Mapping[str, Any]) -> JobConfig:
    """Validate a job's config by its `kind`.

    Raises:
        ConfigError: an unknown kind, or whatever `parse_config` finds.
    """
    kind = str(values.get("kind"))
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is not a kind of job", hint=nearest(kind, KINDS))
    return parse_config(KINDS[kind], values)
