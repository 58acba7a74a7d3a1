"""How the cluster is shared, by what its settings and its users' records say."""

from collections.abc import Iterable

from opentinker.errors import ConfigError
from opentinker.scheduler.placement import Demand, count
from opentinker.scheduler.queueing import Policy
from opentinker.scheduler.records import User
from opentinker.scheduler.settings import Quota, Settings


def policy_of(settings: Settings, users: Iterable[User]) -> Policy:
    """Of shares, those that the settings name come first; of limits, a user's own."""
    shares, quotas = dict[str, float](), dict(settings.quotas)
    for user in users:
        shares[user.name] = user.share
        own = {"gpus": user.max_gpus, "jobs": user.max_jobs}
        limits = {name: value for name, value in own.items() if value is not None}
        if limits:
            quotas[user.name] = quotas.get(user.name, settings.quota).model_copy(update=limits)
    return Policy(
        {**shares, **settings.shares},
        settings.quota,
        quotas,
        half_life_s=settings.usage_half_life_s,
        patience_s=settings.patience_s,
    )


def check_quota(quota: Quota, demand: Demand, priority: int) -> None:
    """Raises: ConfigError when the job alone is above its owner's quota, so that no waiting would help."""
    hint = "ask for less, or ask the cluster's admin for a larger quota"
    if quota.gpus is not None and demand.gpus > quota.gpus + 1e-6:
        raise ConfigError(f"the job asks for {demand}; your quota is {count(quota.gpus, 'GPU')}", hint=hint)
    if quota.jobs == 0:
        raise ConfigError("your quota lets no job run", hint=hint)
    if priority > quota.max_priority:
        raise ConfigError(
            f"scheduling.priority: {priority} is above {quota.max_priority}, the highest you may ask for", hint=hint
        )
