"""The summary and the page of a run of several agents."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from opentinker.training.arena_report import arena_section, later_section, meetings
from opentinker.training.metrics import Row, why_stopped
from opentinker.training.pools_report import pool_charts
from opentinker.training.report import card_row, change, duration, page, stops, trained_part, training_charts, transcripts
from opentinker.training.svg import Series, line_chart, number

_COLOURS = ("a", "b", "c")


def summarize_agents(rows: Sequence[Row]) -> dict[str, Any]:
    """A run's headline numbers, by agent: rewards of the first and last evaluation, or of the first and last step."""
    steps = [row for row in rows if row["kind"] == "agents_step"]
    evaluations = [row for row in rows if row["kind"] == "agents_evaluation"]
    met = meetings(rows)
    shown = evaluations if len(evaluations) > 1 else steps
    names = sorted({name for row in shown for name in row["agents"]})

    def reward(row: Row, name: str) -> float | None:
        return row["agents"].get(name, {}).get("reward_mean")  # type: ignore[no-any-return]

    return {
        "agents": {name: {"reward_before": reward(shown[0], name), "reward_after": reward(shown[-1], name)} for name in names},
        "steps": len(steps),
        "stopped": why_stopped(rows),
        "tokens_sampled": sum(row["tokens_sampled"] for row in [*steps, *evaluations, *met]),
        **({"ratings": met[-1]["ratings"], "worst": met[-1]["worst"]} if met else {}),
    }


def render_agents_report(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    talks: Sequence[Row],
    summary: Mapping[str, Any],
    folder: Path | None = None,
) -> str:
    """The page, from a run's config, metrics rows, transcript rows and summary; images of transcripts are in `folder`."""
    name = config.get("name") or f"{config['environment']['name']} on {config['base_model']}"
    subtitle = (
        f"{len(config['agents'])} agents · {config['base_model']} · {trained_part(config)} · seed {config['training']['seed']}"
    )
    cards = [
        ("lead", change(agent["reward_before"], agent["reward_after"]), f"mean reward of {agent_name}")
        for agent_name, agent in summary["agents"].items()
    ]
    cards += [
        ("", str(summary["steps"]), "training steps"),
        ("", duration(summary["wall_s"]), "wall time"),
        ("", number(summary["tokens_sampled"]), "tokens sampled"),
    ]
    steps = [row for row in rows if row["kind"] == "agents_step"]
    evaluations = [row for row in rows if row["kind"] == "agents_evaluation"]
    body = card_row(cards) + stops(rows) + _chart("Reward in training", steps, "reward_mean")
    if evaluations:
        body += _chart("Held-out reward", evaluations, "reward_mean")
    for metric in sorted({metric for row in steps for agent in row["agents"].values() for metric in agent["env"]}):
        body += _chart(f"{metric} in training", steps, metric, within="env")
    body += pool_charts(steps)
    body += arena_section(rows) + later_section(folder)
    for agent_name in sorted({name for row in steps for name in row["agents"]}):
        own = [{"step": row["step"], **row["agents"][agent_name]} for row in steps if agent_name in row["agents"]]
        body += f"<h2>Training of {escape(agent_name)}</h2>{training_charts(own)}"
    return page(name, subtitle, body + transcripts(talks, folder), config)


def _chart(title: str, rows: Sequence[Row], key: str, within: str | None = None) -> str:
    """One curve for each agent."""
    names = sorted({name for row in rows for name in row["agents"]})
    series = []
    for place, name in enumerate(names):
        found = [(row["step"], row["agents"][name]) for row in rows if name in row["agents"]]
        values = [(step, agent if within is None else agent[within]) for step, agent in found]
        points = [(step, value[key]) for step, value in values if value.get(key) is not None]
        series.append(Series(name, _COLOURS[place % len(_COLOURS)], points))
    keys = "".join(f'<i class="key {one.css}"></i>{escape(one.label)}' for one in series if one.points)
    return f"<h2>{escape(title)}</h2><figure>{line_chart(series)}<figcaption>by training step {keys}</figcaption></figure>"
