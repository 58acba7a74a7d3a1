"""Sinks of a run that is driven from a user's own process, a piece at a time."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from opentinker.config.base import Config, parse_config
from opentinker.config.sinks import Sinks
from opentinker.training.metrics import Row
from opentinker.training.sinks.base import SafeSink
from opentinker.training.sinks.select import check_installed, close_all, make_sinks

AskedSinks = Sequence[str | Mapping[str, Any] | Config]
"""As `sinks` of a config: names, such as "tensorboard", mappings with a `kind`, or models of `opentinker.config.sinks`."""


class _Asked(Config):
    sinks: Sinks = ()


def parse_sinks(asked: AskedSinks) -> Sinks:
    """Raises: ConfigError when one is not known, has a wrong field, or its package is not installed here."""
    sinks = parse_config(_Asked, {"sinks": [dict(each) if isinstance(each, Mapping) else each for each in asked]}).sinks
    check_installed(sinks)
    return sinks


class OwnSinks:
    """A listener of a run's rows. Its sinks are there as long as a piece of the run is, and nothing of them outlives it; the
    next piece goes on as the same run."""

    def __init__(self, asked: Sinks, folder: Path, config: Mapping[str, Any], *, begun: bool = False) -> None:
        """`begun`: an earlier process told them the run's first pieces."""
        self._asked, self._folder, self._config = asked, folder, config
        self._open: tuple[SafeSink, ...] = ()
        self._begun = begun

    def __call__(self, row: Row) -> None:
        for sink in self._open:
            sink(row)

    @contextmanager
    def open(self, steps_done: int) -> Iterator[None]:
        """For a piece of the run that begins after so many steps; its end waits a while for what is still to be passed on."""
        self._open = make_sinks(self._asked, self._folder, self._config, resume_at=steps_done if self._begun else None)
        self._begun = True
        try:
            yield
        finally:
            sinks, self._open = self._open, ()
            close_all(sinks)
