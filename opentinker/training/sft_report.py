"""The summary and the page of a run of supervised fine-tuning."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.training.report import Row, card_row, duration, page, points, small_charts, trained_part
from opentinker.training.svg import Series, line_chart, number


def summarize_sft(rows: Sequence[Row]) -> dict[str, Any]:
    """A run's headline numbers. `loss_before` and `loss_after` are the first and last evaluation's, or without any the first
    and last step's."""
    steps = [r for r in rows if r["kind"] == "sft_step"]
    evaluations = [r for r in rows if r["kind"] == "sft_evaluation"]
    losses = [r["loss"] for r in (evaluations or steps) if r["loss"] is not None]
    return {
        "loss_before": losses[0] if losses else None,
        "loss_after": losses[-1] if len(losses) > 1 else None,
        "held_out": bool(evaluations),
        "steps": len(steps),
        "tokens_trained": sum(r["tokens_trained"] for r in steps),
        "dropped": sum(r["dropped"] for r in steps),
    }


def render_sft_report(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    transcripts: Sequence[Row],
    summary: Mapping[str, Any],
    folder: Path | None = None,
) -> str:
    """The page, from a run's config, metrics rows and summary; there are no transcripts."""
    name = config.get("name") or f"{config['data']['train']['name']} on {config['base_model']}"
    subtitle = (
        f"SFT · {config['base_model']} · {trained_part(config)} · "
        f"learning rate {config['training']['optimizer']['learning_rate']:g} · seed {config['training']['seed']}"
    )
    loss = " → ".join("–" if v is None else f"{v:.3f}" for v in (summary["loss_before"], summary["loss_after"]))
    cards = [
        ("lead", loss, "held-out loss (nats per token)" if summary["held_out"] else "loss (nats per token)"),
        ("", str(summary["steps"]), "training steps"),
        ("", duration(summary["wall_s"]), "wall time"),
        ("", number(summary["tokens_trained"]), "tokens trained"),
        ("", str(summary["dropped"]), "examples too long"),
    ]
    steps = [r for r in rows if r["kind"] == "sft_step"]
    main = [
        Series("loss in training", "a", points(steps, "loss")),
        Series("held-out loss", "c", points([r for r in rows if r["kind"] == "sft_evaluation"], "loss")),
    ]
    keys = "".join(f'<i class="key {s.css}"></i>{s.label}' for s in main if s.points)
    charts = (("gradient norm", "grad_norm"), ("tokens per second", "tokens_per_s"), ("learning rate", "learning_rate"))
    body = (
        f"{card_row(cards)}<h2>Learning curve</h2><figure>{line_chart(main, low=0.0)}"
        f"<figcaption>by training step {keys}</figcaption></figure>{small_charts(steps, charts)}"
    )
    return page(name, subtitle, body, config)
