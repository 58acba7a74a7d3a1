"""Two policies learn gomoku from each other on one server, and are then measured against where they began.

Usage: python tests/scenarios/duel.py [--steps 50] [--learning-rate 5e-3] [--picture docs/images/duel.svg]
A tiny model imitates random legal moves first; black's and white's adapters start from there. The control is the same with a
learning rate of 0. Prints the curves, a cross-play matrix with ratings and a verdict; the exit code is 1 unless rewards summed
to zero in every game, both shares of illegal moves fell, and each final policy beat the other's beginning over both seats, with
an interval that excludes the control's.
"""

import argparse
import asyncio
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.client.messages import AdamParams, LossConfig, Minibatch
from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Action, Message
from opentinker.env.load import load_environment
from opentinker.environments.gomoku.board import cell_name
from opentinker.multiagent.arena import CrossPlay, cross_play
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.supervised import SupervisedRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder
from opentinker.training.svg import Series, line_chart

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "integration" / "server"))

import agents_tools
from server_tools import serving
from tiny_model import build_tiny_model

LORA = LoraConfig(rank=16)
SEATS = ("black", "white")


class Terse(agents_tools.Terse):
    """An illegal answer loses the game."""

    def __init__(self) -> None:
        super().__init__(illegal="lose")


def legal_games(count: int, seed: int) -> list[list[Message]]:
    """Conversations of both seats in games of random legal moves."""
    numbers, found = random.Random(seed), []
    for _ in range(count):
        game, task = Terse(), _task(numbers.getrandbits(30))
        talks: dict[str, list[Message]] = {}
        waiting = {name: str(text) for name, text in game.reset(task).items()}
        agent, done = "black", False
        while not done:
            assert game._game is not None
            move = cell_name(numbers.choice(game._game.board.empty_cells()))
            talks.setdefault(agent, []).extend(
                ({"role": "user", "content": waiting.pop(agent)}, {"role": "assistant", "content": move})
            )
            result = game.step(agent, Action(move))
            for name, text in result.observations.items():
                waiting[name] = "\n\n".join(filter(None, (waiting.get(name), str(text))))
            agent, done = "white" if agent == "black" else "black", result.done
        found += list(talks.values())
    return found


def _task(seed: int) -> Any:
    return Terse.task_source("train", {}).draw(seed, 0, 1)[0]


async def warm_up(client: PolicyClient, steps: int) -> list[float]:
    """Imitate random legal moves; the losses."""
    info = await client.info()
    renderer = ConversationRenderer(ChatTokenizer.from_files(await client.tokenizer_files()), info["stop_token_ids"])
    supervised = SupervisedRenderer(renderer)
    losses = []
    for step in range(steps):
        data = [sequence.to_datum() for talk in legal_games(16, step) for sequence in supervised.render(talk)]
        minibatch = Minibatch(indices=tuple(range(len(data))), factor=1.0 / sum(float(d.weights.sum()) for d in data))
        adam = AdamParams(learning_rate=3e-3 * (1 - step / steps))
        loss = LossConfig(name="cross_entropy")
        answer = await client.train_step(data, [minibatch], loss, adam, publish=step == steps - 1)
        losses.append(float(answer["minibatches"][0]["loss"]))
    return losses


async def warm_model(folder: Path, steps: int) -> Path:
    """A directory with the warmed-up model."""
    start = build_tiny_model(folder / "start")
    async with serving(start, folder / "warming", max_model_len=512) as server:
        losses = await warm_up(server.client, steps)
        print(f"warm-up: loss {losses[0]:.2f} -> {losses[-1]:.2f} in {steps} steps", flush=True)
        saved = Path((await server.client.save("warm"))["path"])
    return _as_model(start, saved, folder / "warm")


def _as_model(start: Path, saved: Path, target: Path) -> Path:
    """The model of `start` with the weights of a checkpoint."""
    shutil.copytree(start, target)
    for file in saved.rglob("model*.safetensors"):
        shutil.copy(file, target / file.name)
    return target


def job(steps: int, learning_rate: float) -> RLJobConfig:
    return parse_config(
        RLJobConfig,
        {
            "base_model": "unused",
            "lora": LORA.model_dump(),
            "environment": {"name": "unused"},
            "agents": {"black": {}, "white": {}},
            "engine": {"max_model_len": 512},
            "algorithm": {"group_size": 8, "credit": "turn", "discount": 0.3},
            "sampling": {"max_tokens": 4},
            "rollout": {"groups_per_step": 8, "max_turns": 6},
            "evaluation": {"max_tasks": 32, "samples_per_task": 4},
            "training": {"steps": steps, "optimizer": {"learning_rate": learning_rate}},
        },
    )


async def duel(warm: Path, folder: Path, steps: int, learning_rate: float) -> tuple[dict[str, list[float]], CrossPlay, float]:
    """Train both; the share of illegal ones among each side's answers by step, the cross-play of beginnings and ends, and
    the largest sum of a game's rewards."""
    config = job(steps, learning_rate)
    environment = load_environment(Terse)
    async with serving(
        warm, folder / "checkpoints", lora=LORA, lora_serving="adapter", max_adapters=4, max_model_len=512
    ) as server:
        recorder = Recorder(folder / "run", config.model_dump(mode="json"))
        loop = await AgentsLoop.connect(config, environment, server.client, recorder)
        worst = 0.0
        illegal: dict[str, list[float]] = {name: [] for name in SEATS}
        run = loop._runner.run

        async def watched(*args: Any, **kwargs: Any) -> Any:
            nonlocal worst
            groups = await run(*args, **kwargs)
            for black, white in zip(groups["black"], groups["white"], strict=True):
                for one, other in zip(black.episodes, white.episodes, strict=True):
                    worst = max(worst, abs(one.reward + other.reward))
            for name in SEATS:
                ended = [episode.metrics for group in groups[name] for episode in group.episodes]
                answers = sum(metrics["moves"] for metrics in ended)
                illegal[name].append(sum(m["illegal"] * m["moves"] for m in ended) / max(answers, 1.0))
            return groups

        loop._runner.run = watched  # type: ignore[method-assign]
        started = time.monotonic()
        await loop.run(steps)
        print(f"learning rate {learning_rate:g}: {steps} steps in {time.monotonic() - started:.0f} s", flush=True)
        for name in SEATS:
            loop._policies[f"{name} at first"] = await server.client.create_policy(LORA, name=f"{name}-at-first", seed=7)
        loop.config = config.model_copy(
            update={"agents": dict(config.agents) | {f"{name} at first": config.agents[name] for name in SEATS}}
        )
        players = {name: loop._player(name, 1.0) for name in (*SEATS, *(f"{name} at first" for name in SEATS))}
        tasks = Terse.task_source("held_out", {}).first(32)
        table = await cross_play(loop._evaluator, SEATS, players, tasks, 4, step=10_000)
        return illegal, table, worst


def drawn(illegal: Mapping[str, Sequence[float]]) -> str:
    """Both shares of illegal answers by step, as a picture with colours of its own."""
    series = [
        Series(name, css, [(float(step), share) for step, share in enumerate(illegal[name], 1)])
        for name, css in (("black", "a"), ("white", "b"))
    ]
    chart = line_chart(series, low=0.0)
    style = (
        "<style>svg{background:#fff}.grid{stroke:#e3e1dc}.tick{fill:#666e7a;font:12px sans-serif}"
        "polyline{fill:none;stroke-width:2}.a{stroke:#2563c9}.b{stroke:#c2570c}text.a{fill:#2563c9;stroke:none}"
        "text.b{fill:#c2570c;stroke:none}</style>"
    )
    keys = "".join(
        f'<text class="{css}" x="{620}" y="{30 + 18 * place}" font-family="sans-serif" font-size="13">{name}</text>'
        for place, (name, css) in enumerate((("black", "a"), ("white", "b")))
    )
    return chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).replace("</svg>", f"{keys}{style}</svg>")


async def main(steps: int, learning_rate: float, warm_steps: int) -> tuple[dict[str, list[float]], bool]:
    with tempfile.TemporaryDirectory(prefix="ot-duel-") as name:
        folder = Path(name)
        warm = await warm_model(folder, warm_steps)
        illegal, table, worst = await duel(warm, folder / "learning", steps, learning_rate)
        print(table.table(), flush=True)
        _, still, _ = await duel(warm, folder / "control", 1, 0.0)
        print(still.table(), flush=True)
    verdicts = {"rewards sum to zero": worst < 1e-9}
    for agent in SEATS:
        shares = illegal[agent]
        tenth = max(len(shares) // 10, 1)
        begin, end = sum(shares[:tenth]) / tenth, sum(shares[-tenth:]) / tenth
        print(f"{agent}: illegal {begin:.3f} -> {end:.3f}; " + json.dumps([round(value, 2) for value in shares]))
        verdicts[f"illegal moves of {agent} fell"] = end < begin
        other = f"{'white' if agent == 'black' else 'black'} at first"
        score, control = table.against(agent, other), still.against(agent, other)
        print(
            f"{agent} against {other}: {score.mean:.3f} (+-{score.half_width:.3f}, {score.games} games); "
            f"without learning {control.mean:.3f} (+-{control.half_width:.3f})"
        )
        verdicts[f"{agent} beats {other}"] = score.mean - score.half_width > control.mean + control.half_width
    print(json.dumps(verdicts))
    return illegal, all(verdicts.values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--warm-steps", type=int, default=12)
    parser.add_argument("--picture", default="")
    options = parser.parse_args()
    learnt, good = asyncio.run(main(options.steps, options.learning_rate, options.warm_steps))
    if options.picture:
        Path(options.picture).write_text(drawn(learnt))
    sys.exit(0 if good else 1)
