"""docs/multiagent.md is true: its environments play, its order of play is one, its configs parse."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import opentinker as ot
from opentinker.client.submission import prepare
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.load import load_environment
from opentinker.multiagent.arena import cross_play
from opentinker.multiagent.players import ScriptedPlayer
from opentinker.multiagent.protocol import Table, checked_turn
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import seats_of

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "multiagent.md").read_text()
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def module(file: str) -> dict[str, Any]:
    [text] = [text for _, name, text in BLOCKS if name == file]
    namespace: dict[str, Any] = {"__name__": Path(file).stem}
    exec(compile(text, file, "exec"), namespace)
    return namespace


async def test_the_auction_is_played_and_pays_the_higher_bid() -> None:
    environment = load_environment(module("auction.py")["Auction"])
    earned: list[dict[str, float]] = []
    players = {
        name: ScriptedPlayer(partial(lambda bid, messages, numbers: bid, bid)) for name, bid in (("ann", "3"), ("bob", "4"))
    }
    runner = GameRunner(environment, seats_of(environment, {}), RolloutConfig(), ot.TurnsConfig(), run_seed=0)
    assert await runner.run(players, [{"ann": 5, "bob": 9}], 1, 0, on_game=lambda episodes: earned.append({})) == {}
    assert earned == [{}], "two scripts leave no episodes"
    played = environment.played()  # type: ignore[attr-defined]
    shown = played.reset({"ann": 5, "bob": 9})
    assert "worth 9" in shown["bob"]
    assert "9" not in shown["ann"]
    assert not played.step("ann", ot.Action("3")).observations
    assert played.step("bob", ot.Action("4")).rewards == {"bob": 5.0}


def test_the_order_of_play_goes_on() -> None:
    protocol, seats = module("speaking.py")["Backwards"](), ("a", "b", "c")
    last: tuple[str, ...] = ()
    acted = []
    for _ in range(6):
        last = checked_turn(protocol, Table(seats, seats, last)).agents
        acted += last
    assert acted == ["c", "b", "a", "c", "b", "a"]


def test_the_configs_parse() -> None:
    for text in (text for kind, _, text in BLOCKS if kind == "yaml"):
        fields = {
            "base_model": "m",
            "lora": {"rank": 16},
            "environment": {"name": "gomoku_duel"},
            "algorithm": {"group_size": 8},
            "agents": {"black": {}, "white": {}},
        }
        job = parse_config(RLJobConfig, fields | yaml.safe_load(text))
        alone = ["white"] if job.coordinator else ["black"]
        assert job.policies == (alone if job.coordinator or job.agents["white"].elsewhere else ["black", "white"])
    for file, adapters in (("gomoku_duel.yaml", 3), ("gomoku_league.yaml", 3)):
        assert prepare(ROOT / "configs" / file).config.engine.max_adapters == adapters


def test_what_the_page_names_is_there() -> None:
    for name in re.findall(r"ot\.(\w+)", PAGE):
        assert hasattr(ot, name), name
    assert callable(cross_play)
    for path in re.findall(r"\]\((\.\./[^)]+)\)", PAGE):
        assert (ROOT / "docs" / path).exists(), path


@pytest.mark.parametrize("name", ["gomoku_duel", "describe_guess", "negotiation"])
def test_built_in_names_have_pages(name: str) -> None:
    assert (ROOT / "environments" / name / "README.md").exists()
