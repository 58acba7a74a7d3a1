"""Gymnasium's environments read as text, take answers in words, and end where Gymnasium ends them."""

from pathlib import Path
from typing import Any

import pytest

gymnasium = pytest.importorskip("gymnasium", reason="pip install gymnasium")

import numpy as np  # noqa: E402
from gymnasium import spaces  # noqa: E402

from opentinker.env.adapters.codecs import Codec, SpaceCodec, in_words  # noqa: E402
from opentinker.env.adapters.common import IllegalMoveError  # noqa: E402
from opentinker.env.load import load_environment  # noqa: E402
from opentinker.errors import ConfigError, EnvironmentLoadError  # noqa: E402

SAFE = {"is_slippery": False}
TO_THE_GOAL = ["down", "down", "right", "right", "down", "I go <answer>right</answer>"]


async def test_frozen_lake_is_walked_to_the_goal_in_words(play: Any) -> None:
    played = await play("gymnasium:FrozenLake-v1", TO_THE_GOAL, SAFE)
    assert "left, down, right, up" in played.first[0]
    assert "[S] F F F\nF H F H\nF F F H\nH F F G\nYou are at row 1, column 1." in played.first[0]
    assert "You are at row 2, column 1" in played.said(0)
    assert [step.reward for step in played.steps] == [0, 0, 0, 0, 0, 1]
    assert played.last.done
    assert played.last.metrics == {"illegal_actions": 0, "time_limit": 0}


async def test_a_hole_ends_the_episode_without_reward(play: Any) -> None:
    played = await play("gymnasium:FrozenLake-v1", ["right", "down", "down"], SAFE)
    assert (len(played.steps), played.last.done, played.last.reward) == (2, True, 0)


async def test_the_time_limit_ends_the_episode(play: Any) -> None:
    played = await play("gymnasium:FrozenLake-v1", ["left"] * 9, SAFE | {"max_episode_steps": 4})
    assert len(played.steps) == 4
    assert played.last.done
    assert played.last.metrics["time_limit"] == 1


async def test_an_illegal_action_leaves_the_position_and_says_what_is_possible(play: Any) -> None:
    played = await play("gymnasium:FrozenLake-v1", ["fly", *TO_THE_GOAL], SAFE | {"illegal_reward": -0.5})
    assert "names none of: left, down, right, up" in played.said(0)
    assert (played.steps[0].reward, played.last.reward) == (-0.5, 1)
    assert played.last.metrics["illegal_actions"] == 1


async def test_an_illegal_action_can_end_the_episode(play: Any) -> None:
    played = await play("gymnasium:FrozenLake-v1", ["fly", "down"], SAFE | {"illegal": "end", "illegal_reward": -1})
    assert (len(played.steps), played.last.done, played.last.reward) == (1, True, -1)


async def test_taxi_says_where_everything_is_and_scales_its_reward(play: Any) -> None:
    played = await play("gymnasium:Taxi-v4", ["drop off", "pickup", "south"], {"reward_scale": 0.1}, task={"seed": 1})
    assert "|R: | : :G|" in played.first[0]
    assert "The taxi is at row" in played.first[0]
    assert "Actions with an effect now: " in played.first[0]
    assert [step.reward for step in played.steps] == pytest.approx([-1.0, -1.0, -0.1])


async def test_blackjack_tells_the_cards_and_pays_once(play: Any) -> None:
    played = await play("gymnasium:Blackjack-v1", ["I stand."], task={"seed": 3})
    assert "Your cards add up to" in played.first[0]
    assert "The dealer shows" in played.first[0]
    assert played.last.done
    assert played.last.reward in (-1, 0, 1)


async def test_the_cliff_is_walked_around(play: Any) -> None:
    fallen = await play("gymnasium:CliffWalking-v1", ["right", "up"])
    assert [step.reward for step in fallen.steps] == [-100, -1]
    assert "row 4, column 1" in fallen.said(0)
    around = await play("gymnasium:CliffWalking-v1", ["up"] + ["right"] * 11 + ["down"])
    assert around.last.done
    assert sum(step.reward for step in around.steps) == -13


async def test_sampled_actions_are_legal(play: Any) -> None:
    task = {"seed": 2}
    actions = load_environment("gymnasium:Taxi-v4").sample_actions(task)  # type: ignore[attr-defined]
    assert (await play("gymnasium:Taxi-v4", actions, task=task)).last.metrics["illegal_actions"] == 0


@pytest.mark.parametrize("name", ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1", "CartPole-v1"])
async def test_a_seed_determines_an_episode(play: Any, name: str) -> None:
    games = [await play(f"gymnasium:{name}", ["0", "1", "0", "1"], seed=seed) for seed in (4, 4)]
    assert games[0] == games[1]


async def test_slippery_ice_differs_by_seed(play: Any) -> None:
    games = [await play("gymnasium:FrozenLake-v1", ["down"] * 5, seed=seed) for seed in range(8)]
    assert len({"".join(game.said(0)) for game in games}) > 1


async def test_numbers_are_read_for_a_box(play: Any) -> None:
    played = await play("gymnasium:MountainCarContinuous-v0", ["push 0.5", "5", "1 2"])
    assert "Each turn, answer with 1 numbers in Box" in played.first[0]
    assert "is not in Box" in played.said(1)
    assert "2 numbers instead of 1" in played.said(2)
    assert played.last.metrics["illegal_actions"] == 2


async def test_actions_can_be_named(play: Any) -> None:
    played = await play("gymnasium:CartPole-v1", ["west", "1"], {"actions": ["west", "east"]})
    assert "one action: west, east." in played.first[0]
    assert [step.reward for step in played.steps] == [1, 1]


CODEC = """
from opentinker.env.adapters.codecs import Codec
from opentinker.env.adapters.common import IllegalMoveError

class Pole(Codec):
    def rules(self):
        return ""
    def observe(self, observation, info):
        return "leaning " + ("left" if observation[2] < 0 else "right")
    def act(self, text):
        if text not in ("<-", "->"):
            raise IllegalMoveError("write an arrow")
        return int(text == "->")

class Nothing:
    def __init__(self, env):
        pass
"""


async def test_a_codec_from_a_file_says_things_its_way(play: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(CODEC)
    played = await play("gymnasium:CartPole-v1", ["->", "left"], {"codec": f"{tmp_path}/mine.py:Pole"})
    assert played.first[0].startswith("leaning ")
    assert played.said(0).startswith("leaning ")
    assert played.said(1) == "Not possible: write an arrow."


async def test_a_codec_is_also_given_as_a_class_and_may_show_images(play: Any) -> None:
    image = b"\x89PNG\r\n\x1a\n" + b"0" * 20

    class Seen(Codec):
        def rules(self) -> str:
            return "Look."

        def observe(self, observation: Any, info: Any) -> Any:
            from opentinker.images import Image

            return Image.of(image)

        def act(self, text: str) -> Any:
            return 0

    played = await play("gymnasium:CartPole-v1", ["x"], {"codec": Seen})
    assert "Look." in played.first[0]
    assert "image" in played.first[0]
    assert "image" in played.said(0)


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("FrozenLake-v1", {"colour": "blue"}, "unexpected keyword argument 'colour'"),
        ("FrozenLake-v1", {"map_name": "9x9"}, "9x9"),
        ("FrozenLake-v1", {"actions": ["left"]}, "1 names for 4 actions"),
        ("FrozenLake-v1", {"illegal": "maybe"}, "maybe"),
        ("FrozenLake-v1", {"codec": "no/such.py:Codec"}, "does not exist"),
        ("FrozenLake-v1", {"codec": Codec, "actions": ["a"]}, "named by the codec"),
    ],
)
def test_wrong_arguments_show_before_any_episode(name: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_environment(f"gymnasium:{name}").task_source("train", args)


def test_what_is_no_codec_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine2.py").write_text(CODEC)
    with pytest.raises(ConfigError, match=r"Nothing is no codec.*rules, observe and act"):
        load_environment("gymnasium:CartPole-v1").task_source("train", {"codec": f"{tmp_path}/mine2.py:Nothing"})


def test_an_unknown_environment_is_refused() -> None:
    with pytest.raises(EnvironmentLoadError, match="FrozenLak"):
        load_environment("gymnasium:FrozenLak-v1")


class Made(gymnasium.Env):  # type: ignore[misc, name-defined]
    metadata: dict[str, Any] = {"render_modes": ["ansi"]}  # noqa: RUF012

    def __init__(self, action_space: Any, render_mode: str | None = None) -> None:
        self.action_space, self.render_mode = action_space, render_mode
        self.observation_space = spaces.Text(10)

    def render(self) -> str:
        return "a \x1b[41mX\x1b[0m b"


@pytest.mark.parametrize(
    ("space", "text", "action"),
    [
        (spaces.MultiDiscrete([3, 4]), "2 and 3", [2, 3]),
        (spaces.MultiBinary(3), "1 0 1", [1, 0, 1]),
        (spaces.Text(5, charset="abc"), "<answer>cab</answer>", "cab"),
        (spaces.Discrete(3, start=5), "take 6", 6),
        (spaces.Box(-1, 1, (2, 1), np.float32), "0.5 -1e0", [[0.5], [-1]]),
    ],
)
def test_common_spaces_are_read(space: Any, text: str, action: Any) -> None:
    chosen = SpaceCodec(Made(space)).act(text)
    assert (chosen.tolist() if hasattr(chosen, "tolist") else chosen) == action
    with pytest.raises(IllegalMoveError):
        SpaceCodec(Made(space)).act("dddddddd 99 99 99 99")


@pytest.mark.parametrize("space", [spaces.Discrete(1000), spaces.Dict({"a": spaces.Discrete(2)}), spaces.Box(0, 1, (100,))])
def test_a_space_that_does_not_fit_into_words_asks_for_a_codec(space: Any) -> None:
    with pytest.raises(ConfigError, match=r"cannot be put into words.*give a codec"):
        SpaceCodec(Made(space))


def test_a_drawing_keeps_what_its_colours_marked() -> None:
    assert SpaceCodec(Made(spaces.Discrete(2), "ansi")).observe("", {}) == "a [X] b"


def test_observations_of_any_kind_have_words() -> None:
    assert in_words({"a": np.array([1.23456, 2]), "b": (3, "x")}) == "a: [1.235, 2]; b: [3, x]"
