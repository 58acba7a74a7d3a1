"""The summary and the page of a run of preference training."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.training.report import Row, card_row, change, duration, page, points, small_charts, trained_part
from opentinker.training.svg import Series, line_chart, number

_TITLES = {"dpo": "DPO", "ipo": "IPO", "bradley_terry": "reward model"}


def summarize_preference(rows: Sequence[Row]) -> dict[str, Any]:
    """A run's headline numbers. `*_before` and `*_after` are the first and last evaluation's, or without any the first and last
    step's; `accuracy_ci` is half of the last evaluation's 95% interval."""
    steps = [r for r in rows if r["kind"] == "preference_step"]
    evaluations = [r for r in rows if r["kind"] == "preference_evaluation"]
    measured = [r for r in (evaluations or steps) if r["accuracy"] is not None]
    first, last = (measured[0] if measured else None), (measured[-1] if len(measured) > 1 else None)
    return {
        **{
            f"{name}_{when}": row and row[name]
            for name in ("accuracy", "margin", "loss")
            for when, row in (("before", first), ("after", last))
        },
        "accuracy_ci": last and last.get("accuracy_ci"),
        "held_out": bool(evaluations),
        "steps": len(steps),
        "pairs_trained": sum(r["pairs"] for r in steps),
        "tokens_trained": sum(r["tokens_trained"] for r in steps),
        "dropped": sum(r["dropped"] for r in steps),
        "unusable": sum(r["unusable"] for r in steps),
    }


def render_preference_report(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    transcripts: Sequence[Row],
    summary: Mapping[str, Any],
    folder: Path | None = None,
) -> str:
    """The page, from a run's config, metrics rows and summary; there are no transcripts."""
    loss = config["loss"]
    name = config.get("name") or f"{config['data']['train']['name']} on {config['base_model']}"
    beta = f" · beta {loss['beta']:g}" if "beta" in loss else ""
    subtitle = (
        f"{_TITLES[loss['kind']]} · {config['base_model']} · {trained_part(config)}{beta} · "
        f"learning rate {config['training']['optimizer']['learning_rate']:g} · seed {config['training']['seed']}"
    )
    where = "held-out" if summary["held_out"] else "in training"
    half = summary["accuracy_ci"]
    cards = [
        ("lead", _change(summary, "accuracy"), f"accuracy, {where}" + (f" (±{half:.2f})" if half is not None else "")),
        ("", _change(summary, "margin"), f"reward margin, {where}"),
        ("", _change(summary, "loss"), f"loss, {where}"),
        ("", str(summary["steps"]), "training steps"),
        ("", number(summary["pairs_trained"]), "pairs trained"),
        ("", duration(summary["wall_s"]), "wall time"),
    ]
    if left_out := summary["dropped"] + summary["unusable"]:
        cards.append(("", str(left_out), "pairs left out"))
    steps = [r for r in rows if r["kind"] == "preference_step"]
    evaluations = [r for r in rows if r["kind"] == "preference_evaluation"]
    accuracy = [
        Series("accuracy in training", "a", points(steps, "accuracy")),
        Series("held-out accuracy", "c", points(evaluations, "accuracy"), [r["accuracy_ci"] for r in evaluations]),
    ]
    losses = [
        Series("loss in training", "a", points(steps, "loss")),
        Series("held-out loss", "c", points(evaluations, "loss")),
    ]
    charts = [
        ("reward margin", "margin"),
        ("reward of chosen answers", "chosen_reward"),
        ("reward of rejected answers", "rejected_reward"),
        ("logprob of chosen answers", "chosen_logprob"),
        ("logprob of rejected answers", "rejected_logprob"),
        ("gradient norm", "grad_norm"),
        ("tokens per second", "tokens_per_s"),
        ("learning rate", "learning_rate"),
    ]
    shown = [(title, key) for title, key in charts if points(steps, key)]
    body = f"{card_row(cards)}{_figure('Accuracy', accuracy, 0.0)}{_figure('Loss', losses, None)}{small_charts(steps, shown)}"
    return page(name, subtitle, body, config)


def _figure(title: str, series: Sequence[Series], low: float | None) -> str:
    keys = "".join(f'<i class="key {s.css}"></i>{s.label}' for s in series if s.points)
    return (
        f"<h2>{title}</h2><figure>{line_chart(list(series), low=low)}<figcaption>by training step {keys}</figcaption></figure>"
    )


def _change(summary: Mapping[str, Any], name: str) -> str:
    return change(summary[f"{name}_before"], summary[f"{name}_after"])
