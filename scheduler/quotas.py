"""What an owner's quota refuses at once, because no waiting could change it."""

from opentinker.errors import ConfigError
from opentinker.scheduler.placement import Demand, count
from opentinker.scheduler.settings import Quota


def check_quota(quota: Quota, demand: Demand, priority: int) -> None:
    """Raises: ConfigError when the job alone is above its owner's quota."""
    hint = "ask for less, or ask the cluster's admin for a larger quota"
    if quota.gpus is not None and demand.gpus > quota.gpus + 1e-6:
        raise ConfigError(f"the job asks for {demand}; your quota is {count(quota.gpus, 'GPU')}", hint=hint)
    if quota.jobs == 0:
        raise ConfigError("your quota lets no job run", hint=hint)
    if priority > quota.max_priority:
        raise ConfigError(
            f"scheduling.priority: {priority} is above {quota.max_priority}, the highest you may ask for", hint=hint
        )
