"""OpenTinker: reinforcement learning as a service for LLM agents.

The names below load on first use, so that `import opentinker` is light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentinker.client.client import Client, Job
    from opentinker.client.messages import AdamParams
    from opentinker.client.submitted import SubmittedJob
    from opentinker.config.agents import AgentConfig, TurnsConfig
    from opentinker.config.algorithms import CISPOConfig as CISPO
    from opentinker.config.algorithms import CriticConfig, KLConfig, MismatchConfig, OverlongConfig
    from opentinker.config.algorithms import DAPOConfig as DAPO
    from opentinker.config.algorithms import DrGRPOConfig as DrGRPO
    from opentinker.config.algorithms import GRPOConfig as GRPO
    from opentinker.config.algorithms import GSPOConfig as GSPO
    from opentinker.config.algorithms import PPOConfig as PPO
    from opentinker.config.algorithms import ReinforcePPConfig as ReinforcePP
    from opentinker.config.algorithms import RLOOConfig as RLOO
    from opentinker.config.arena import ArenaConfig
    from opentinker.config.coordination import CoordinatorConfig
    from opentinker.config.job import InferenceJobConfig, InteractiveJobConfig, RLJobConfig
    from opentinker.config.opponents import ChatModelConfig, PoolConfig
    from opentinker.config.preference import BradleyTerryConfig as BradleyTerry
    from opentinker.config.preference import DPOConfig as DPO
    from opentinker.config.preference import IPOConfig as IPO
    from opentinker.config.preference import PreferenceEvaluationConfig
    from opentinker.config.resources import Resources, Scheduling
    from opentinker.config.rl import EvaluationConfig, StopConfig
    from opentinker.config.rollout import RolloutConfig, SamplingConfig
    from opentinker.config.server import EngineConfig, LoraConfig, TrainerConfig
    from opentinker.config.servers import FurtherServerConfig
    from opentinker.config.sft import SFTEvaluationConfig
    from opentinker.env.datasets import load_tasks
    from opentinker.env.environment import Action, Environment, Message, StepResult
    from opentinker.env.remote import RemoteEnvironment, remote_environment
    from opentinker.env.tasks import GeneratedTasks, ListTasks, TaskSource
    from opentinker.errors import JobFailedError, OpenTinkerError, ServerLostError
    from opentinker.images import Image
    from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
    from opentinker.multiagent.protocol import (
        AgentProtocol,
        Alternating,
        EnvironmentChooses,
        Free,
        ModeratorChooses,
        RoundRobin,
        Simultaneous,
        Table,
        Turn,
    )
    from opentinker.training.trainer import MultiAgentTrainer, PreferenceTrainer, RLTrainer, SFTTrainer

_HOMES = {
    "opentinker.client.client": ("Client", "Job"),
    "opentinker.client.messages": ("AdamParams",),
    "opentinker.client.submitted": ("SubmittedJob",),
    "opentinker.config.coordination": ("CoordinatorConfig",),
    "opentinker.config.algorithms": ("CriticConfig", "KLConfig", "MismatchConfig", "OverlongConfig"),
    "opentinker.config.agents": ("AgentConfig", "TurnsConfig"),
    "opentinker.config.arena": ("ArenaConfig",),
    "opentinker.config.job": ("InferenceJobConfig", "InteractiveJobConfig", "RLJobConfig"),
    "opentinker.config.resources": ("Resources", "Scheduling"),
    "opentinker.config.rl": ("EvaluationConfig", "StopConfig"),
    "opentinker.config.preference": ("PreferenceEvaluationConfig",),
    "opentinker.config.sft": ("SFTEvaluationConfig",),
    "opentinker.config.opponents": ("ChatModelConfig", "PoolConfig"),
    "opentinker.config.rollout": ("RolloutConfig", "SamplingConfig"),
    "opentinker.config.server": ("EngineConfig", "LoraConfig", "TrainerConfig"),
    "opentinker.config.servers": ("FurtherServerConfig",),
    "opentinker.env.datasets": ("load_tasks",),
    "opentinker.env.environment": ("Action", "Environment", "Message", "StepResult"),
    "opentinker.env.remote": ("RemoteEnvironment", "remote_environment"),
    "opentinker.env.tasks": ("GeneratedTasks", "ListTasks", "TaskSource"),
    "opentinker.errors": ("JobFailedError", "OpenTinkerError", "ServerLostError"),
    "opentinker.images": ("Image",),
    "opentinker.multiagent.environment": ("MultiAgentEnvironment", "MultiStepResult"),
    "opentinker.multiagent.protocol": (
        "AgentProtocol",
        "Alternating",
        "EnvironmentChooses",
        "Free",
        "ModeratorChooses",
        "RoundRobin",
        "Simultaneous",
        "Table",
        "Turn",
    ),
    "opentinker.training.trainer": ("MultiAgentTrainer", "PreferenceTrainer", "RLTrainer", "SFTTrainer"),
}
_LAZY = {name: (home, name) for home, names in _HOMES.items() for name in names}
_ALGORITHMS = ("CISPO", "DAPO", "DrGRPO", "GRPO", "GSPO", "PPO", "RLOO", "ReinforcePP")
_LAZY |= {name: ("opentinker.config.algorithms", f"{name}Config") for name in _ALGORITHMS}
_LAZY |= {name: ("opentinker.config.preference", f"{name}Config") for name in ("BradleyTerry", "DPO", "IPO")}

__version__ = "0.1.0"
__all__ = [
    "CISPO",
    "DAPO",
    "DPO",
    "GRPO",
    "GSPO",
    "IPO",
    "PPO",
    "RLOO",
    "Action",
    "AdamParams",
    "AgentConfig",
    "AgentProtocol",
    "Alternating",
    "ArenaConfig",
    "BradleyTerry",
    "ChatModelConfig",
    "Client",
    "CoordinatorConfig",
    "CriticConfig",
    "DrGRPO",
    "EngineConfig",
    "Environment",
    "EnvironmentChooses",
    "EvaluationConfig",
    "Free",
    "FurtherServerConfig",
    "GeneratedTasks",
    "Image",
    "InferenceJobConfig",
    "InteractiveJobConfig",
    "Job",
    "JobFailedError",
    "KLConfig",
    "ListTasks",
    "LoraConfig",
    "Message",
    "MismatchConfig",
    "ModeratorChooses",
    "MultiAgentEnvironment",
    "MultiAgentTrainer",
    "MultiStepResult",
    "OpenTinkerError",
    "OverlongConfig",
    "PoolConfig",
    "PreferenceEvaluationConfig",
    "PreferenceTrainer",
    "RLJobConfig",
    "RLTrainer",
    "ReinforcePP",
    "RemoteEnvironment",
    "Resources",
    "RolloutConfig",
    "RoundRobin",
    "SFTEvaluationConfig",
    "SFTTrainer",
    "SamplingConfig",
    "Scheduling",
    "ServerLostError",
    "Simultaneous",
    "StepResult",
    "StopConfig",
    "SubmittedJob",
    "Table",
    "TaskSource",
    "TrainerConfig",
    "Turn",
    "TurnsConfig",
    "load_tasks",
    "remote_environment",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'opentinker' has no attribute '{name}'")
    module, attribute = _LAZY[name]
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
