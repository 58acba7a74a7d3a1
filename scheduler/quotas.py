"""Who may hold how much: the cluster's settings and what is kept of users, as one policy."""

from collections.abc import Iterable
from typing import Protocol

from opentinker.errors import ConfigError
from opentinker.scheduler.placement import Demand, count
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.settings import Quota, Settings


class Entitled(Protocol):
    """What a user is entitled to; None: what the settings say."""

    @property
    def name(self) -> str: ...
    @property
    def share(self) -> float: ...
    @property
    def max_gpus(self) -> float | None: ...
    @property
    def max_jobs(self) -> int | None: ...


def policy_of(settings: Settings, users: Iterable[Entitled] = ()) -> Policy:
    """The settings' policy, in which a user's own limits, and a share other than 1, come before the settings' for them."""
    shares, quotas = dict(settings.shares), dict(settings.quotas)
    for user in users:
        if user.share != 1.0:
            shares[user.name] = user.share
        own = {"gpus": user.max_gpus, "jobs": user.max_jobs}
        given = {name: limit for name, limit in own.items() if limit is not None}
        if given:
            quotas[user.name] = quotas.get(user.name, settings.quota).model_copy(update=given)
    node_types = settings.node_types if settings.autoscale else ()
    return Policy(shares, settings.quota, quotas, settings.usage_half_life_s, settings.patience_s, node_types)


def check_quota(quota: Quota, demand: Demand, priority: int) -> None:
    """Refuse what no waiting could change.

    Raises:
        ConfigError: the job alone is above its owner's quota.
    """
    hint = "ask for less, or ask the cluster's admin for a larger quota"
    if quota.gpus is not None and demand.gpus > quota.gpus + 1e-6:
        raise ConfigError(f"the job asks for {demand}; your quota is {count(quota.gpus, 'GPU')}", hint=hint)
    if quota.jobs == 0:
        raise ConfigError("your quota lets no job run", hint=hint)
    if priority > quota.max_priority:
        raise ConfigError(f"scheduling.priority: {priority} is above your highest, {quota.max_priority}", hint=hint)
