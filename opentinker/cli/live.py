"""Views that stay current: on a terminal in place, elsewhere one after the other."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from rich.console import RenderableType
from rich.live import Live

from opentinker.cli.common import out
from opentinker.cli.patience import Patience

T = TypeVar("T")


def repeat(read: Callable[[], T], take: Callable[[T], None], period_s: float | None) -> None:
    """Hand over what `read` gives: once, or with a period until Ctrl-C, which is the ordinary end.

    Raises:
        UnavailableError, DeadlineError: see `Patience`.
    """
    if period_s is None:
        take(read())
        return
    patience = Patience()
    with suppress(KeyboardInterrupt):
        while True:
            take(patience.ask(read))
            time.sleep(period_s)


def show(read: Callable[[], T], view: Callable[[T], RenderableType], period_s: float | None) -> None:
    """Print the view of what `read` gives; with a period and on a terminal, on a screen of its own. As `repeat`."""
    if period_s is None or not out.is_terminal:
        repeat(read, lambda seen: out.print(view(seen)), period_s)
        return
    with suppress(KeyboardInterrupt):
        first = view(read())  # a cluster that is not there is said on the ordinary screen
        with Live(first, console=out, screen=True, auto_refresh=False) as live:
            repeat(read, lambda seen: live.update(view(seen), refresh=True), period_s)
