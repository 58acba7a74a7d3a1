"""report.html: a run on one self-contained page (no script, no external asset)."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from opentinker.training.svg import Series, line_chart, number

Row = Mapping[str, Any]
Render = Callable[..., str]
"""(config, rows, transcripts, summary, folder) -> the page."""

MESSAGES_SHOWN = 4
PAIRS_SHOWN = 6
TASK_CHARACTERS = 200
"""Of a task in the heading of its transcript."""
IMAGE_BYTES = 1 << 20
"""Larger images are named and not shown, so that the page stays light."""

_STYLE = """
:root { color-scheme: light dark; --bg: #fbfaf8; --card: #fff; --ink: #1d2129; --dim: #666e7a; --edge: #e3e1dc;
  --a: #2563c9; --b: #c2570c; --c: #2f855a; --policy: #e8f0fe; --other: #f3f2ef }
@media (prefers-color-scheme: dark) { :root { --bg: #14161a; --card: #1c1f25; --ink: #e7e9ee; --dim: #9aa2af;
  --edge: #2f343d; --a: #7db0ff; --b: #ffae6b; --c: #7fd6a4; --policy: #20304d; --other: #262a31 } }
* { box-sizing: border-box }
body { margin: 0; background: var(--bg); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif }
main { max-width: 1080px; margin: 0 auto; padding: 32px 20px 64px }
h1 { font-size: 26px; margin: 0 0 2px }
h2 { font-size: 17px; margin: 36px 0 10px }
h3 { font-size: 13px; margin: 0 0 4px; color: var(--dim); font-weight: 600 }
.sub, .empty, figcaption, .meta, summary { color: var(--dim) }
.sub { margin: 0 0 20px }
.stop { margin: 12px 0 0 }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px }
.card, figure, .talk, .config { background: var(--card); border: 1px solid var(--edge); border-radius: 10px;
  padding: 12px 14px; margin: 0 }
.card b { display: block; font-size: 21px; font-variant-numeric: tabular-nums; white-space: nowrap }
.card span, .meta, figcaption { font-size: 13px }
.card span { color: var(--dim) }
.card.lead b { color: var(--c) }
.small { display: grid; grid-template-columns: repeat(auto-fit, minmax(300px, 1fr)); gap: 12px; margin-top: 12px }
svg { display: block; width: 100%; height: auto }
img { display: block; max-width: 100%; max-height: 320px; border-radius: 6px }
.grid { stroke: var(--edge) }
.tick { fill: var(--dim); font-size: 12px }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round }
.a { stroke: var(--a) } .b { stroke: var(--b) } .c { stroke: var(--c); stroke-width: 2 } .d { stroke: var(--dim) }
.heat { stroke: none } .heat.a { fill: var(--a) } .heat.b { fill: var(--b) } .cell { fill: var(--ink); font-size: 13px }
.tick.small { font-size: 10px }
.dot { stroke: var(--card) }
.a.dot, .a .dot { fill: var(--a) } .b.dot, .b .dot { fill: var(--b) } .c.dot, .c .dot { fill: var(--c) }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 3px; margin: 0 5px 0 14px }
.key.a { background: var(--a) } .key.b { background: var(--b) } .key.c { background: var(--c); border-radius: 50% }
.key.d { background: var(--dim) } .d.dot { fill: var(--dim) }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: 12px; margin-bottom: 12px }
@media (max-width: 720px) { .pair { grid-template-columns: 1fr } }
.msg { border-radius: 8px; padding: 6px 10px; margin: 6px 0; background: var(--other); white-space: pre-wrap;
  overflow-wrap: anywhere }
.msg.assistant { background: var(--policy) }
.msg small { display: block; color: var(--dim); font-size: 11px }
pre { overflow-x: auto; font-size: 13px; margin: 8px 0 0 }
summary { cursor: pointer }
"""


def render_report(
    config: Mapping[str, Any],
    rows: Sequence[Row],
    talks: Sequence[Row],
    summary: Mapping[str, Any],
    folder: Path | None = None,
) -> str:
    """The page, from a run's config, metrics rows, transcript rows and summary; images of transcripts are in `folder`."""
    name = config.get("name") or f"{config['environment']['name']} on {config['base_model']}"
    subtitle = (
        f"{config['algorithm']['kind'].upper()} · {config['base_model']} · {trained_part(config)} · "
        f"learning rate {config['training']['optimizer']['learning_rate']:g} · seed {config['training']['seed']}"
    )
    return page(name, subtitle, f"{_cards(summary)}{stops(rows)}{_curves(rows)}{transcripts(talks, folder)}", config)


def page(name: str, subtitle: str, body: str, config: Mapping[str, Any]) -> str:
    """A run's page around its `body`, which is HTML; everything else is escaped here."""
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(name)}</title><style>{_STYLE}</style></head><body><main>"
        f'<h1>{escape(name)}</h1><p class="sub">{escape(subtitle)}</p>{body}'
        "<h2>Config</h2><details class='config'><summary>the resolved config</summary>"
        f"<pre>{escape(yaml.safe_dump(dict(config), sort_keys=False))}</pre></details></main></body></html>\n"
    )


def trained_part(config: Mapping[str, Any]) -> str:
    """Which weights a run trains, in words."""
    return f"LoRA rank {config['lora']['rank']}" if config.get("lora") else "full parameters"


def change(before: float | None, after: float | None) -> str:
    """`0.17 → 0.78`, or what is known of it."""
    return " → ".join("–" if v is None else f"{v:.2f}" for v in (before, after))


def _cards(summary: Mapping[str, Any]) -> str:
    cards = []
    if summary["exact_before"] is not None or summary["exact_after"] is not None:
        half = summary["exact_ci"]
        note = "held-out exact" + (f" (±{half:.2f})" if half is not None else "")
        cards.append(("lead", change(summary["exact_before"], summary["exact_after"]), note))
    cards += [
        ("", change(summary["reward_before"], summary["reward_after"]), "mean reward"),
        ("", str(summary["steps"]), "training steps"),
        ("", duration(summary["wall_s"]), "wall time"),
        ("", number(summary["tokens_sampled"]), "tokens sampled"),
    ]
    if summary["mismatch_kl_mean"] is not None:
        cards.append(("", f"{summary['mismatch_kl_mean']:.2g}", "engine/trainer KL"))
    return card_row(cards)


def card_row(cards: Sequence[tuple[str, str, str]]) -> str:
    """(class, value, label) each."""
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card {css}"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for css, value, label in cards
        )
        + "</div>"
    )


def stops(rows: Sequence[Row]) -> str:
    """What was done where a run was slowed down or ended early, and why."""
    return "".join(
        f'<p class="sub stop">after step {row["step"]}: {escape(row["reason"])}: {escape(row["action"])}</p>'
        for row in rows
        if row["kind"] == "stopping"
    )


def _curves(rows: Sequence[Row]) -> str:
    steps = [r for r in rows if r["kind"] == "step"]
    evaluations = [r for r in rows if r["kind"] == "evaluation"]
    main = [Series("reward in training", "a", points(steps, "reward_mean"))]
    if any(r["exact"] is not None for r in steps):
        main.append(Series("exact in training", "b", points(steps, "exact")))
    measure = "exact" if any(r["exact"] is not None for r in evaluations) else "reward_mean"
    held_out = [r for r in evaluations if r[measure] is not None]
    widths = [r["exact_ci" if measure == "exact" else "reward_ci"] for r in held_out]
    label = "held-out exact" if measure == "exact" else "held-out reward"
    main.append(Series(label, "c", points(held_out, measure), widths))
    keys = "".join(f'<i class="key {s.css}"></i>{s.label}' for s in main if s.points)
    return (
        f"<h2>Learning curve</h2><figure>{line_chart(main, low=0.0)}"
        f"<figcaption>by training step {keys}</figcaption></figure>{training_charts(steps)}"
    )


def training_charts(steps: Sequence[Row]) -> str:
    """Small curves of how a policy's training goes."""
    small: tuple[tuple[str, str], ...] = (
        ("engine/trainer mismatch (KL)", "mismatch_kl_mean"),
        ("gradient norm", "grad_norm"),
        ("rollout tokens per second", "tokens_per_s"),
        ("seconds per step", "step_s"),
        ("groups without a gradient", "zero_variance_groups"),
        ("failed episodes", "errors"),
    )
    told = (("entropy of what was sampled", "entropy_estimate"), ("distance from the reference (KL)", "reference_kl_mean"))
    small += tuple(chart for chart in told if any(r.get(chart[1]) is not None for r in steps))
    if any(r.get("value_loss") is not None for r in steps):
        small += (("value loss", "value_loss"), ("variance that the critic explains", "explained_variance"))
    return small_charts(steps, small)


def small_charts(steps: Sequence[Row], charts: Sequence[tuple[str, str]]) -> str:
    """One small curve for each (title, key)."""
    series = [Series(title, "a", points(steps, key)) for title, key in charts]
    figures = (f"<figure><h3>{s.label}</h3>{line_chart([s], width=420, height=150, low=0.0)}</figure>" for s in series)
    return f"<div class='small'>{''.join(figures)}</div>"


def points(rows: Sequence[Row], key: str) -> list[tuple[float, float]]:
    """(step, value) of the rows that have one."""
    return [(r["step"], r[key]) for r in rows if r.get(key) is not None]


def transcripts(rows: Sequence[Row], folder: Path | None) -> str:
    """Pairs of an episode before and after training, as HTML."""
    shown = [r for r in rows if r["phase"] == "evaluation"] or list(rows)
    if not shown:
        return ""
    first, last = shown[0]["step"], shown[-1]["step"]
    after = {_task(r): r for r in shown if r["step"] == last}
    before = [r for r in shown if r["step"] == first]
    pairs: list[tuple[Row, Row | None]] = [(r, after.get(_task(r)) if first != last else None) for r in before]
    if first != last and not any(b for _, b in pairs):
        pairs = list(zip(before, after.values(), strict=False))
    blocks = "".join(
        f'<div class="pair">{_talk(a, "before", folder)}{_talk(b, "after", folder) if b else ""}</div>'
        for a, b in pairs[:PAIRS_SHOWN]
    )
    return f"<h2>Sample transcripts</h2>{blocks}"


def _task(row: Row) -> str:
    return json.dumps(row["task"], sort_keys=True, default=str)


def _shortened(text: str) -> str:
    return text if len(text) <= TASK_CHARACTERS else f"{text[:TASK_CHARACTERS]} …"


def _talk(row: Row, when: str, folder: Path | None) -> str:
    messages = [
        f'<div class="msg {escape(m["role"])}"><small>{escape(m["role"])}</small>{_content(m["content"], folder)}</div>'
        for m in row["messages"]
    ]
    folded, shown = messages[:-MESSAGES_SHOWN], messages[-MESSAGES_SHOWN:]
    earlier = f"<details><summary>{len(folded)} earlier messages</summary>{''.join(folded)}</details>" if folded else ""
    outcome = f"reward {row['reward']:.2f} · {escape(row['termination'])}" + (
        f" · {escape(row['error'])}" if row["error"] else ""
    )
    return (
        f'<div class="talk"><h3>{when}: step {row["step"]}, task {escape(_shortened(_task(row)))}</h3>{earlier}{"".join(shown)}'
        f'<div class="meta">{outcome}</div></div>'
    )


def _content(content: Any, folder: Path | None) -> str:
    if isinstance(content, str):
        return escape(content)
    return "".join(escape(part["text"]) if part["type"] == "text" else _image(part["file"], folder) for part in content)


def _image(name: str, folder: Path | None) -> str:
    path = None if folder is None else folder / name
    if path is None or not path.is_file() or path.stat().st_size > IMAGE_BYTES:
        return f"[{escape(name)}]"
    encoded = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(name)}" src="data:image/{escape(path.suffix[1:])};base64,{encoded}">'


def duration(seconds: float) -> str:
    """In the unit that reads best."""
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"
