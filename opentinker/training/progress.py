"""Rows of metrics as live progress: a small curve on a terminal, one line per row elsewhere."""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 60
_CURVES = {"step": "reward_mean", "agents_step": "reward_mean", "sft_step": "loss", "preference_step": "accuracy"}
"""By kind of row, what is drawn."""
_LABELS = {"sft_step": "loss", "preference_step": "accuracy"}


def sparkline(values: Sequence[float], width: int = _WIDTH) -> str:
    """The last `width` values as block characters between their minimum and maximum."""
    shown = list(values)[-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    if high == low:
        return _BARS[0] * len(shown)
    return "".join(_BARS[round((v - low) / (high - low) * (len(_BARS) - 1))] for v in shown)


def step_line(row: Mapping[str, Any], total: int) -> str:
    """A step row in one line."""
    width = len(str(total))
    parts = [f"step {row['step']:>{width}}/{total}", f"reward {_number(row['reward_mean'])}"]
    if row["exact"] is not None:
        parts.append(f"exact {_number(row['exact'])}")
    parts += [f"{row['tokens_per_s'] or 0:.0f} tok/s", f"{row['step_s']:.1f} s"]
    if row["errors"]:
        parts.append(f"{row['errors']} failed episodes")
    return "  ".join(parts)


def sft_line(row: Mapping[str, Any], total: int) -> str:
    """A step of supervised fine-tuning in one line."""
    width = len(str(total))
    parts = [f"step {row['step']:>{width}}/{total}", f"loss {_number(row['loss'])}"]
    parts += [f"{row['tokens_per_s'] or 0:.0f} tok/s", f"{row['step_s']:.1f} s"]
    if row["dropped"]:
        parts.append(f"{row['dropped']} examples too long")
    return "  ".join(parts)


def preference_line(row: Mapping[str, Any], total: int) -> str:
    """A step of preference training in one line."""
    width = len(str(total))
    parts = [f"step {row['step']:>{width}}/{total}", f"loss {_number(row['loss'])}", f"accuracy {_number(row['accuracy'])}"]
    parts += [f"margin {_number(row['margin'])}", f"{row['tokens_per_s'] or 0:.0f} tok/s", f"{row['step_s']:.1f} s"]
    if row["dropped"]:
        parts.append(f"{row['dropped']} pairs too long")
    if row["unusable"]:
        parts.append(f"{row['unusable']} rows unusable")
    return "  ".join(parts)


def agents_line(row: Mapping[str, Any], total: int) -> str:
    """A step or an evaluation of several agents in one line."""
    rewards = ", ".join(f"{name} {_number(agent['reward_mean'])}" for name, agent in row["agents"].items())
    if row["kind"] == "agents_evaluation":
        return f"held-out reward {rewards} after {row['step']} steps"
    parts = [f"step {row['step']:>{len(str(total))}}/{total}", f"reward {rewards}", f"{row['step_s']:.1f} s"]
    if row["errors"]:
        parts.append(f"{row['errors']} failed episodes")
    return "  ".join(parts)


def cross_play_line(row: Mapping[str, Any]) -> str:
    """A meeting of players in one line."""
    rated = [f"{name} {found['mean']:+.0f}" for name, found in row["rating"].items()]
    worst = [f"{name} {found['mean']:.2f} against {found['against']}" for name, found in row["worst"].items()]
    parts = [f"Elo {', '.join(rated)}"] if rated else []
    parts += [f"worst {', '.join(worst)}"] if worst else []
    return f"{'; '.join(parts) or 'cross-play'} after {row['step']} steps ({row['games']} games)"


def evaluation_line(row: Mapping[str, Any]) -> str:
    """An evaluation row in one line."""
    name, value, half_width = (
        ("reward", row["reward_mean"], row["reward_ci"]) if row["exact"] is None else ("exact", row["exact"], row["exact_ci"])
    )
    passed = "".join(f", pass@{k} {value:.3f}" for k, value in row.get("pass_at", {}).items())
    return f"held-out {name} {_number(value)} ±{half_width:.3f}{passed} after {row['step']} steps ({row['tasks']} tasks)"


class Progress:
    """A listener of metrics rows. Use it as a context manager; it takes the terminal between enter and exit."""

    def __init__(self, title: str, total_steps: int, *, console: Console | None = None) -> None:
        self.total_steps = total_steps
        self._title = title
        self._console = console or Console()
        self._curve: list[float] = []
        self._label = "reward"
        self._evaluations: list[str] = []
        self._now = "starting"
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None

    def __enter__(self) -> Self:
        if self._live:
            self._live.__enter__()
            self._draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live:
            self._live.__exit__(kind, error, trace)

    def status(self, text: str) -> None:
        """What is going on before the first row."""
        if text == self._now:
            return
        self._now = text
        self._draw() if self._live else self._print(text)

    def __call__(self, row: dict[str, Any]) -> None:
        line = row_line(row, self.total_steps)
        if row["kind"].endswith("evaluation") or row["kind"] == "cross_play":
            self._evaluations.append(line)
        else:
            self._now = line
        if row["kind"] == "resumed":
            self._curve = []
        else:
            self._curve += [row[key] for kind, key in _CURVES.items() if row["kind"] == kind and row[key] is not None]
            self._label = _LABELS.get(row["kind"], self._label)
        self._draw() if self._live else self._print(line)

    def _print(self, line: str) -> None:
        self._console.print(Text(f"{self._title}: {line}"), soft_wrap=True)

    def _draw(self) -> None:
        if self._live is None:
            return
        lines = [Text.assemble((self._title, "bold"), "  ", self._now)]
        if curve := self._curve:
            lines.append(
                Text.assemble((f"{self._label} ", "dim"), f"{curve[0]:.2f} ", (sparkline(curve), "green"), f" {curve[-1]:.2f}")
            )
        lines += [Text(line, "cyan") for line in self._evaluations[-3:]]
        self._live.update(Group(*lines))


def row_line(row: Mapping[str, Any], total_steps: int) -> str:
    """Any row of metrics in one line."""
    match row["kind"]:
        case "evaluation":
            return evaluation_line(row)
        case "agents_step" | "agents_evaluation":
            return agents_line(row, total_steps)
        case "cross_play":
            return cross_play_line(row)
        case "sft_step":
            return sft_line(row, total_steps)
        case "sft_evaluation":
            return f"held-out loss {row['loss']:.3f} after {row['step']} steps ({row['examples']} examples)"
        case "preference_step":
            return preference_line(row, total_steps)
        case "preference_evaluation":
            return (
                f"held-out accuracy {row['accuracy']:.3f} ±{row['accuracy_ci']:.3f}, loss {row['loss']:.3f} "
                f"after {row['step']} steps ({row['pairs']} pairs)"
            )
        case "preference_reference":
            return f"reference logprobs of {row['answers']} answers in {row['reference_s']:.1f} s"
        case "stopping":
            return f"{row['reason']}: {row['action']}"
        case "resumed":
            return f"resumed after step {row['step']}" if row["step"] >= 0 else "started anew"
        case _:
            return step_line(row, total_steps)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
