"""What a run's page shows of the past versions that played."""

from collections.abc import Sequence
from html import escape

from opentinker.training.metrics import Row
from opentinker.training.svg import Series, line_chart

_SHOWN = (("mean", "a"), ("hardest", "b"))


def pool_charts(steps: Sequence[Row]) -> str:
    """For each seat of past versions, how often they were beaten; nothing without any."""
    return "".join(_chart(seat, steps) for seat in sorted({seat for row in steps for seat in row.get("pools", {})}))


def _chart(seat: str, steps: Sequence[Row]) -> str:
    rates = [(row["step"], list(row["pools"][seat]["win_rates"].values())) for row in steps if seat in row.get("pools", {})]
    curves = {
        "mean": [(step, sum(values) / len(values)) for step, values in rates if values],
        "hardest": [(step, min(values)) for step, values in rates if values],
    }
    series = [Series(label, css, curves[label]) for label, css in _SHOWN]
    keys = "".join(f'<i class="key {one.css}"></i>{escape(one.label)}' for one in series if one.points)
    caption = f"<figcaption>share of games won against the members, by step {keys}</figcaption>"
    return f"<h2>Against past versions as {escape(seat)}</h2><figure>{line_chart(series)}{caption}</figure>"
