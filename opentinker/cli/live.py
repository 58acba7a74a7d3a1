"""Views that stay current: on a terminal in place, elsewhere one after the other."""

import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from rich.console import RenderableType
from rich.live import Live

from opentinker.cli.common import out
from opentinker.cli.patience import Patience

T = TypeVar("T")


def frames(
    read: Callable[[], T], period_s: float | None, *, quiet: bool = False
) -> Iterator[tuple[Callable[[RenderableType], None], T]]:
    """(show, what `read` gave), once, or with a period until Ctrl-C, which is the ordinary end. `quiet` leaves the terminal
    alone.

    Raises:
        UnavailableError, DeadlineError: see `Patience`.
    """
    if period_s is None:
        yield out.print, read()
        return
    patience = Patience()
    try:
        if quiet or not out.is_terminal:
            while True:
                yield out.print, patience.ask(read)
                time.sleep(period_s)
        first = patience.ask(read)  # a cluster that is not there is said on the ordinary screen
        with Live(console=out, screen=True, auto_refresh=False) as live:
            yield lambda view: live.update(view, refresh=True), first
            while True:
                time.sleep(period_s)
                yield lambda view: live.update(view, refresh=True), patience.ask(read)
    except KeyboardInterrupt:
        return
