"""What a run's meetings show: a table, a picture, a part of the report, and numbers for programs."""

import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from opentinker.training.heat_map import Shown, heat_map
from opentinker.training.metrics import Row
from opentinker.training.svg import Series, line_chart

LATER = "arena"
"""In a run's folder, the one of checkpoints that met after it."""
_COLOURS = ("a", "b", "c")
_STYLE = (
    "<style>svg{background:#fff}.grid{stroke:#e3e1dc}.tick{fill:#666e7a;font:12px sans-serif}.small{font-size:10px}"
    ".cell{fill:#1d2129;font:13px sans-serif}.title{fill:#1d2129;font:600 14px sans-serif}"
    "polyline{fill:none;stroke-width:2}.a{stroke:#2563c9}.b{stroke:#c2570c}.c{stroke:#2f855a}.d{stroke:#8a919c}"
    ".dot{stroke:#fff}.a .dot,.a.dot,.key.a{fill:#2563c9}.b .dot,.b.dot,.key.b{fill:#c2570c}.c .dot,.c.dot,.key.c{fill:#2f855a}"
    ".d .dot,.d.dot,.key.d{fill:#8a919c}.heat{stroke:none}.heat.a{fill:#2563c9}.heat.b{fill:#c2570c}</style>"
)


def meetings(rows: Sequence[Row]) -> list[Row]:
    """The rows of meetings, in their order."""
    return [row for row in rows if row["kind"] == "cross_play"]


def arena_files(rows: Sequence[Row], title: str = "") -> dict[str, str]:
    """The files of a run that has such rows: `cross_play.json`, `.md` and `.svg`."""
    found = meetings(rows)
    if not found:
        return {}
    return {
        "cross_play.json": json.dumps(as_json(found), indent=1) + "\n",
        "cross_play.md": as_markdown(found, title),
        "cross_play.svg": as_picture(found, title),
    }


def as_json(found: Sequence[Row]) -> dict[str, Any]:
    """All meetings, and the ratings after the last one."""
    last = found[-1]
    kept = ("step", "score", "players", "matrix", "anchor", "ratings", "rating", "worst", "games", "errors")
    return {
        "score": last["score"],
        "anchor": last["anchor"],
        "ratings": last["ratings"],
        "meetings": [{name: row[name] for name in kept} for row in found],
    }


def as_markdown(found: Sequence[Row], title: str = "") -> str:
    """The last meeting's table, the ratings over the run, and how the policies did against reference players."""
    last = found[-1]
    title = title or f"Cross-play after {last['step']} steps"
    names, columns, cells = _table(last)
    what = "scores (1 won, 0 lost, 0.5 drawn)" if last["score"] == "won" else "mean rewards"
    parts = [
        f"# {title}\n\nRows against columns: {what}, with half the width of the 95% interval.\n",
        _markdown_table(
            ["", *columns],
            [
                [
                    name,
                    *(f"{c.value:.3f} ±{c.half_width:.3f}" if (c := cells.get((name, column))) else "" for column in columns),
                ]
                for name in names
            ],
        ),
    ]
    if last["ratings"]:
        curves = rating_curves(last)
        steps = sorted({int(step) for curve in curves.values() for step, *_ in curve})
        by_step = {name: {int(step): (value, half) for step, value, half in curve} for name, curve in curves.items()}
        parts += [
            f"## Elo ratings\n\nAll meetings together; `{last['anchor']}` has 0.\n",
            _markdown_table(
                ["step", *by_step],
                [[str(step), *(_rating(by_step[name].get(step)) for name in by_step)] for step in steps],
            ),
        ]
        if standing := _standing(last):
            parts.append(
                _markdown_table(["player", "rating"], [[name, _rating((value, half))] for name, value, half in standing])
            )
    if any(row["worst"] for row in found):
        names = list(dict.fromkeys(name for row in found for name in row["worst"]))
        parts += [
            "## Worst result against a reference player\n\nA best response may do better still: exact exploitability is not "
            "measured.\n",
            _markdown_table(["step", *names], [[str(row["step"]), *(_worst(row, name) for name in names)] for row in found])
            if len(found) > 1
            else _markdown_table(["player", "result"], [[name, _worst(last, name)] for name in names]),
        ]
    return "\n".join(parts)


def as_picture(found: Sequence[Row], title: str = "") -> str:
    """The last meeting's table as a heat map, and the ratings over the run, as one SVG file."""
    last = found[-1]
    drawn = [(title or f"Rows against columns after {last['step']} steps", _heat(last))]
    if last["ratings"]:
        drawn.append((f"Elo by training step ({last['anchor']} = 0)", _curve(last)))
    parts, y, width = [], 10, 0
    for title, chart in drawn:
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', chart)
        if box is None:
            continue  # there is nothing to draw
        wide, high = float(box[1]), float(box[2])
        parts.append(f'<text class="title" x="16" y="{y + 18}">{escape(title)}</text>')
        parts.append(chart.replace("<svg ", f'<svg x="0" y="{y + 28}" width="{wide:g}" height="{high:g}" ', 1))
        y += 28 + int(high) + 16
        width = max(width, int(wide))
    for place, (label, css) in enumerate(_legend(last)):
        parts.append(f'<circle class="key {css}" cx="{24 + 120 * place}" cy="{y}" r="5"/>')
        parts.append(f'<text class="tick" x="{34 + 120 * place}" y="{y + 4}">{escape(label)}</text>')
        width = max(width, 140 + 120 * place)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 20}" width="{width}" height="{y + 20}">'
        f"{_STYLE}{''.join(parts)}</svg>\n"
    )


def arena_section(rows: Sequence[Row], title: str = "") -> str:
    """The part of a report; empty for a run without meetings."""
    found = meetings(rows)
    if not found:
        return ""
    last = found[-1]
    what = "1 won, 0 lost, 0.5 drawn" if last["score"] == "won" else "mean rewards"
    title = title or f"Who beats whom after {last['step']} steps"
    body = (
        f"<h2>{escape(title)}</h2><figure>{_heat(last)}"
        f"<figcaption>rows against columns: {what}, with half the width of the 95% interval</figcaption></figure>"
    )
    if last["ratings"]:
        keys = "".join(f'<i class="key {css}"></i>{escape(label)}' for label, css in _legend(last))
        body += (
            f"<h2>Elo over the run</h2><figure>{_curve(last)}<figcaption>by training step, {escape(last['anchor'])} has 0"
            f"{keys}</figcaption></figure>"
        )
    if last["worst"] and len(found) > 1:
        names = list(last["worst"])
        series = [
            Series(
                name, _COLOURS[place % 3], [(row["step"], row["worst"][name]["mean"]) for row in found if name in row["worst"]]
            )
            for place, name in enumerate(names)
        ]
        keys = "".join(f'<i class="key {one.css}"></i>{escape(one.label)}' for one in series)
        body += (
            f"<h2>Worst result against a reference player</h2><figure>{line_chart(series)}<figcaption>by training step{keys}; "
            "a best response may do better still</figcaption></figure>"
        )
    return body


def later_section(folder: Path | None) -> str:
    """As `arena_section`, of the checkpoints that met after the run, if its folder tells of some."""
    path = None if folder is None else folder / LATER / "cross_play.json"
    if path is None or not path.is_file():
        return ""
    rows = [{**row, "kind": "cross_play"} for row in json.loads(path.read_text(encoding="utf-8"))["meetings"]]
    return arena_section(rows, "Checkpoints that met after the run")


def rating_curves(row: Row) -> dict[str, list[tuple[float, float, float]]]:
    """(step, rating, half width) of each agent's versions."""
    found: dict[str, list[tuple[float, float, float]]] = {}
    for name, rating in row["ratings"].items():
        agent, at, step = name.rpartition("@")
        if at and step.isdigit():
            found.setdefault(agent, []).append((float(step), rating["mean"], _half(rating)))
    return {agent: sorted(points) for agent, points in found.items()}


def _standing(row: Row) -> list[tuple[str, float, float]]:
    """(name, rating, half width) of those who stay the same."""
    return [
        (name, rating["mean"], _half(rating))
        for name, rating in row["ratings"].items()
        if not name.rpartition("@")[2].isdigit()
    ]


def _curve(row: Row) -> str:
    curves = rating_curves(row)
    last = max((step for curve in curves.values() for step, *_ in curve), default=0.0)
    series = [Series(name, "d", [(0.0, value), (max(last, 1.0), value)]) for name, value, _ in _standing(row)]
    for place, (name, curve) in enumerate(curves.items()):
        css, points = _COLOURS[place % len(_COLOURS)], [(step, value) for step, value, _ in curve]
        if len(points) > 1:
            series.append(Series(name, css, points))
        series.append(Series(name, css, points, [half for *_, half in curve]))
    return line_chart(series)


def _legend(row: Row) -> list[tuple[str, str]]:
    if not row["ratings"]:
        return []
    agents = [(name, _COLOURS[place % len(_COLOURS)]) for place, name in enumerate(rating_curves(row))]
    standing = ", ".join(f"{name} {value:+.0f}" for name, value, _ in _standing(row))
    return [*agents, *([(standing, "d")] if standing else [])]


def _heat(row: Row) -> str:
    names, columns, cells = _table(row)
    return heat_map(names, columns, cells, **({"middle": 0.5, "reach": 0.5} if row["score"] == "won" else {}))


def _table(row: Row) -> tuple[list[str], list[str], dict[tuple[str, str], Shown]]:
    """Rows and columns of a meeting: those whom it is about, and those whom they met."""
    matrix: Mapping[str, Mapping[str, Any]] = row["matrix"]
    cells = {
        (name, other): Shown(found["mean"], (found["high"] - found["low"]) / 2)
        for name, others in matrix.items()
        for other, found in others.items()
    }
    names = [name for name in row["players"].values() if name in matrix]
    met = dict.fromkeys(other for name in names for other in matrix[name])
    columns = [*(name for name in names if name in met), *(other for other in met if other not in names)]
    return names, columns, cells


def _half(rating: Mapping[str, Any]) -> float:
    """0 where it is not known."""
    return 0.0 if rating["high"] is None or rating["low"] is None else float(rating["high"] - rating["low"]) / 2


def _rating(found: tuple[float, float] | None) -> str:
    return "" if found is None else f"{found[0]:+.0f} ±{found[1]:.0f}"


def _worst(row: Row, name: str) -> str:
    found = row["worst"].get(name)
    return "" if found is None else f"{found['mean']:.3f} against {found['against']}"


def _markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned, so that it can be read as it is."""
    widths = [max(len(line[place]) for line in [head, *rows]) for place in range(len(head))]
    lines = [head, ["-" * max(width, 3) for width in widths], *rows]
    padded = ([f"{cell:<{max(width, 3)}}" for cell, width in zip(line, widths, strict=True)] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in padded)
