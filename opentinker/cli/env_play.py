"""`opentinker env play`: be the policy yourself."""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from opentinker.cli.common import out, signals_as_interrupt
from opentinker.cli.env_arguments import ArgsOption, EnvironmentArgument, constructor_arguments, environment_name
from opentinker.env.environment import Message, StepResult
from opentinker.env.load import load_for_one
from opentinker.env.play import Game, read_actions, saved_image
from opentinker.errors import ConfigError

_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
_HELP = "a line is your answer; end it with \\ to go on in the next line; Ctrl-D ends the episode"
_LONGEST = 4_000
"""Characters of one text that are shown."""


def play(
    name: EnvironmentArgument,
    args: ArgsOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Which training task.")] = 0,
    held_out: Annotated[
        int | None, typer.Option(min=0, help="Play the held-out task with this number instead.", show_default=False)
    ] = None,
    task: Annotated[str | None, typer.Option(help="Play this task instead, as JSON.", show_default=False)] = None,
    actions: Annotated[
        Path | None,
        typer.Option(
            help='Play what stands in a file, one action a line (a JSON text such as "a\\nb" has several lines); - is stdin.',
            allow_dash=True,
            show_default=False,
        ),
    ] = None,
    max_turns: Annotated[int, typer.Option(min=1, help="The episode is cut after so many turns, as in training.")] = 100,
    images: Annotated[
        Path | None, typer.Option(help="Where to save images. Default: a new temporary folder.", show_default=False)
    ] = None,
) -> None:
    """Play an episode: see what a policy would see, and what your answers earn."""
    environment = load_for_one(environment_name(name))
    arguments = constructor_arguments(args)
    answers = _typed() if actions is None else iter(_script(actions))
    screen = _Screen(images)
    with signals_as_interrupt(), Game(environment, arguments) as game:
        chosen = (
            _parsed(task) if task is not None else game.task(*(("train", seed) if held_out is None else ("held_out", held_out)))
        )
        try:
            screen.note(f"task: {json.dumps(chosen, ensure_ascii=False)}")
            screen.messages(game.reset(chosen))
            screen.tools(game.tools)
            if actions is None:
                screen.note(_HELP)
            for _ in range(max_turns):
                answer = next(answers, None)
                if answer is None:
                    break
                if actions is not None:
                    screen.messages([{"role": "assistant", "content": answer}])
                result = game.step(answer)
                screen.messages(result.observation)  # type: ignore[arg-type]
                screen.reward(result, "reward")
                if result.done:
                    break
            if (last := game.finalize()) is not None:
                screen.reward(last, "last reward")
        finally:
            screen.totals(game)


def _typed() -> Iterator[str]:
    """What a person types, until Ctrl-D."""
    while True:
        lines = []
        prompt = "> "
        try:
            while (line := input(prompt)).endswith("\\"):
                lines.append(line[:-1])
                prompt = ". "
        except EOFError:
            print()
            return
        yield "\n".join([*lines, line])


def _script(file: Path) -> list[str]:
    try:
        return read_actions(sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the actions of {file} cannot be read: {error}") from error


def _parsed(task: str) -> Any:
    try:
        return json.loads(task)
    except ValueError as error:
        raise ConfigError(f"--task is not JSON: {error}") from None


class _Screen:
    """What is shown, and images in files."""

    def __init__(self, images: Path | None) -> None:
        self._images = images

    def note(self, text: str) -> None:
        out.print(Text(_cut(text), "dim"), soft_wrap=True)

    def messages(self, messages: Sequence[Message]) -> None:
        for message in messages:
            out.print(Text(message["role"], f"bold {_ROLES[message['role']]}"))
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                text = Text(_cut(part["text"])) if part["type"] == "text" else self._image(part["image"])  # type: ignore[typeddict-item]
                out.print(Padding(text, (0, 0, 0, 2)))

    def _image(self, image: Any) -> Text:
        if self._images is None:
            self._images = Path(tempfile.mkdtemp(prefix="opentinker-play-"))
        path, what = saved_image(image, self._images)
        return Text(f"[image {what}: {path}]", "italic")

    def tools(self, tools: Sequence[Any]) -> None:
        for tool in tools:
            function = tool["function"]
            names = ", ".join((function.get("parameters") or {}).get("properties") or {})
            out.print(
                Text.assemble(("tool ", "bold yellow"), f"{function['name']}({names}): {function.get('description', '')}")
            )
        if tools:
            self.note('call one with <tool_call>{"name": ..., "arguments": {...}}</tool_call>')

    def reward(self, result: StepResult, label: str) -> None:
        text = Text(f"{label} {result.reward:+.3g}", "bold blue")
        text.append(_listed(result.components, " = ", " + "), "not bold blue")
        text.append(_listed(result.metrics, "; ", ", "), "not bold dim")
        out.print(text, soft_wrap=True)

    def totals(self, game: Game) -> None:
        totals = game.totals
        out.print(Rule(style="dim"))
        how = "done" if totals.done else "not finished"
        turns = f"{totals.turns} turn{'' if totals.turns == 1 else 's'}"
        text = Text(f"{how} after {turns}: {totals.reward:.3g}", "bold")
        text.append(_listed(totals.components, " = ", " + "), "not bold")
        text.append(_listed(totals.metrics, "; ", ", "), "not bold dim")
        out.print(text, soft_wrap=True)


def _listed(numbers: dict[str, float], before: str, between: str) -> str:
    return before + between.join(f"{name} {value:.3g}" for name, value in numbers.items()) if numbers else ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text):,} characters)"
