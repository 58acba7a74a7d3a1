"""Where a run's periodic checkpoints are."""

from collections.abc import Mapping

from opentinker.training.schedule import checkpoint_name


class CheckpointBook:
    """Those of a job that goes on as itself: its servers know them by name."""

    spare = 0
    """Periodic checkpoints that are kept beside those that the config asks for."""

    def where(self, step: int, policy: str = "") -> str:
        """What `load` is given for the checkpoint of a step: of an agent's policy, or of the only one."""
        return checkpoint_name(step)

    def saved(self, step: int, versions: Mapping[str, int]) -> None:
        """The checkpoints of a step are whole, each at this version, by policy: agents, or "" where there is one."""
