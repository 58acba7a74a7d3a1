"""Games of PettingZoo whose every seat is a player of the run: the order, the views and the rewards are the game's own."""

import functools
import importlib
import pickle
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
pytest.importorskip("pygame", reason="pip install pygame-ce: PettingZoo's classic games import it")

from pettingzoo.classic import connect_four_v3, rps_v2, tictactoe_v3

from opentinker.client.functions import refuse_adapter_functions
from opentinker.client.messages import Sample, SamplingParams
from opentinker.config.agents import TurnsConfig
from opentinker.config.job import RLJobConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.adapters.pettingzoo_parallel import PettingZooParallel
from opentinker.env.environment import Action, Environment, Message
from opentinker.env.load import load_environment, load_for_one
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.players import Player, PolicyPlayer, ScriptedPlayer
from opentinker.multiagent.protocol import Table, checked_turn
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats
from opentinker.multiagent.shared import SharedEnvironment
from opentinker.rollout.types import Episode, Termination

TTT, FOUR = "pettingzoo_aec:classic.tictactoe_v3", "pettingzoo_aec:classic.connect_four_v3"
RPS = "pettingzoo_parallel:classic.rps_v2"
OUT, AUCTION = "pettingzoo_aec:game_of_out", "pettingzoo_parallel:game_of_auction"
STOP = 1


class Letters:
    """Renders a message as its characters' codes."""

    stop_token_ids = (STOP,)
    preserves_prefix = True

    def render_prompt(self, messages: Sequence[Message], *rest: Any) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['content']};"]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("".join(chr(t) for t in action_tokens if t != STOP))

    def observation_delta(self, action_tokens: Sequence[int], observation: Sequence[Message], *rest: Any) -> list[int]:
        return self.render_prompt(observation)


def policy(says: Callable[[int], str], order: list[str] | None = None, name: str = "") -> PolicyPlayer:
    """A stub policy: it says what a function of the request's seed gives, and notes that it was asked."""

    async def generate(prompt: Any, params: SamplingParams, request_id: str) -> Sample:
        if order is not None:
            order.append(name)
        tokens = np.array([*map(ord, says(params.seed or 0)), STOP], np.int32)
        return Sample(tokens, np.full(len(tokens), -0.5, np.float32), "stop", ((0, len(tokens)),))

    renderer: Any = Letters()
    return PolicyPlayer(renderer, generate, SamplingParams(max_tokens=64), 100_000)


def script(*words: str, order: list[str] | None = None) -> PolicyPlayer:
    """A stub policy that says these words in order."""
    left = list(words)
    return policy(lambda seed: left.pop(0), order)


def one_of(*words: str) -> PolicyPlayer:
    """A stub policy that says one of the words by the request's seed."""
    return policy(lambda seed: random.Random(seed).choice(words))


def game_of(name: str) -> type[MultiAgentEnvironment]:
    loaded = load_environment(name)
    assert issubclass(loaded, SharedEnvironment)
    return loaded.played


def runner(name: str, args: Mapping[str, Any] | None = None, **turns: Any) -> GameRunner:
    loaded, game = load_environment(name), game_of(name)
    seats = Seats(game.agents, game.protocol)
    return GameRunner(
        functools.partial(loaded, **(args or {})), seats, RolloutConfig(member_retries=0), TurnsConfig(**turns), run_seed=0
    )


async def play(name: str, args: Mapping[str, Any] | None = None, task: Any = None, **players: Player) -> dict[str, Episode]:
    """One game; the episode of each policy."""
    groups = await runner(name, args).run(players, [task or {"seed": 3}], 1, step=0)
    assert not [failure.error for [group] in groups.values() for failure in group.failures]
    return {agent: group.episodes[0] for agent, [group] in groups.items()}


def shown(episode: Episode) -> list[str]:
    """What the agent was told before each of its answers, and at the end."""
    texts, parts = [], []
    for message in episode.messages:
        if message["role"] == "assistant":
            texts.append("\n".join(parts))
            parts = []
        else:
            parts.append(str(message["content"]))
    return [*texts, "\n".join(parts)]


async def test_tic_tac_toe_is_played_from_both_seats() -> None:
    games = await play(TTT, player_1=script("5", "I take <answer>1</answer>", "9"), player_2=script("2", "3"))
    first, second = games["player_1"], games["player_2"]
    assert first.rewards == [0, 0, 1]
    assert second.rewards == [0, -1]
    assert shown(first)[0].endswith("1 2 3\n4 5 6\n7 8 9\nLegal moves: 1, 2, 3, 4, 5, 6, 7, 8, 9")
    assert shown(first)[1] == "Your opponent played 2.\n\n1 O 3\n4 X 6\n7 8 9\nLegal moves: 1, 3, 4, 6, 7, 8, 9"
    assert shown(second)[0].startswith("You play tic-tac-toe and are X.")
    assert shown(second)[0].endswith("Your opponent played 5.\n\n1 2 3\n4 O 6\n7 8 9\nLegal moves: 1, 2, 3, 4, 6, 7, 8, 9")
    assert shown(second)[1] == "Your opponent played 1.\n\nO X 3\n4 O 6\n7 8 9\nLegal moves: 3, 4, 6, 7, 8, 9"
    assert shown(first)[-1] == "X O O\n4 X 6\n7 8 X\nThe game is over."
    assert shown(second)[-1] == "Your opponent played 9.\n\nO X X\n4 O 6\n7 8 O\nThe game is over."
    assert first.metrics == {"illegal": 0, "moves": 3, "won": 1, "lost": 0, "draw": 0}
    assert second.metrics == {"illegal": 0, "moves": 2, "won": 0, "lost": 1, "draw": 0}
    assert first.termination is second.termination is Termination.DONE


async def test_a_draw_is_neither_won_nor_lost() -> None:
    games = await play(TTT, player_1=script("1", "2", "6", "7", "9"), player_2=script("5", "3", "4", "8"))
    for episode in games.values():
        assert sum(episode.rewards) == 0
        assert (episode.metrics["won"], episode.metrics["lost"], episode.metrics["draw"]) == (0, 0, 1)


async def test_connect_four_is_played_with_a_scripted_player_whose_seat_leaves_no_episode() -> None:
    heard: list[str] = []

    def always_1(messages: Sequence[Message], numbers: random.Random) -> str:
        heard.append(str(messages[-1]["content"]))
        return "1"

    games = await play(FOUR, player_0=script("4", "4", "4", "column 4"), player_1=ScriptedPlayer(always_1))
    assert list(games) == ["player_0"]
    assert games["player_0"].rewards == [0, 0, 0, 1]
    assert "O . . X . . ." in shown(games["player_0"])[1]
    assert "Your opponent played 4." in heard[0]
    assert ". . . O . . ." in heard[0], "X is always me"


async def test_the_order_of_play_is_the_games_own() -> None:
    order: list[str] = []
    players = {name: policy(lambda seed: "5" if seed % 2 else "nothing", order, name) for name in game_of(TTT).agents}
    await play(TTT, **players)
    assert len(order) >= 5
    assert order == [("player_1", "player_2")[place % 2] for place in range(len(order))]


async def test_simultaneous_moves_are_collected_before_the_game_sees_any(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    seen: list[tuple[int, list[str]]] = []
    played = PettingZooParallel.step_together

    def step_together(self: PettingZooParallel, actions: Mapping[str, Action]) -> MultiStepResult:
        seen.append((len(asked), list(actions)))
        return played(self, actions)

    monkeypatch.setattr(PettingZooParallel, "step_together", step_together)
    words = {"player_0": ["rock", "paper", "rock"], "player_1": ["paper", "paper", "scissors"]}
    players = {name: script(*said, order=asked) for name, said in words.items()}
    games = await play(RPS, {"max_cycles": 3}, **players)
    assert seen == [(2, ["player_0", "player_1"]), (4, ["player_0", "player_1"]), (6, ["player_0", "player_1"])]
    first, second = games["player_0"], games["player_1"]
    assert (first.rewards, second.rewards) == ([-1, 0, 1], [1, 0, -1])
    assert shown(second)[0].endswith("Nothing has been played yet.\nLegal moves: rock, paper, scissors")
    assert shown(second)[1] == "The opponent's last choice: rock.\nLegal moves: rock, paper, scissors"
    assert shown(first)[1] == "The opponent's last choice: paper.\nLegal moves: rock, paper, scissors"
    assert first.metrics["draw"] == second.metrics["draw"] == 1, "what counts is the whole game"


async def test_what_is_hidden_stays_hidden_where_a_simultaneous_game_is_played_in_turns() -> None:
    name = "pettingzoo_aec:classic.rps_v2"
    games = await play(name, {"max_cycles": 2}, player_0=script("rock", "rock"), player_1=script("paper", "scissors"))
    first, second = games["player_0"], games["player_1"]
    assert shown(second)[0].endswith("Nothing has been played yet.\nLegal moves: rock, paper, scissors")
    assert shown(second)[1] == "The opponent's last choice: rock.\nLegal moves: rock, paper, scissors"
    assert (first.rewards, second.rewards) == ([-1, 1], [1, -1])


async def test_a_game_with_more_choices_names_them() -> None:
    games = await play(RPS, {"max_cycles": 1, "num_actions": 5}, player_0=script("spock"), player_1=script("lizard"))
    assert "Answer with one of the 5." in shown(games["player_0"])[0]
    assert shown(games["player_0"])[1] == "The opponent's last choice: lizard.\nThe game is over."


async def test_an_illegal_answer_costs_and_a_random_legal_move_is_played() -> None:
    games = await play(TTT, player_1=one_of("1", "5", "9"), player_2=one_of("what?"))
    first, second = games["player_1"], games["player_2"]
    assert "Your answer named no legal move: " in shown(second)[1]
    assert "Your opponent played " in shown(first)[1]
    assert second.metrics["illegal"] == 1
    assert second.components["illegal"] == pytest.approx(-0.1 * second.turns)
    assert first.components["illegal"] == pytest.approx(-0.1 * first.metrics["illegal"] * first.metrics["moves"])
    assert first.components["game"] + second.components["game"] == 0


@pytest.mark.parametrize(("args", "cost"), [({}, -1.0), ({"illegal_reward": -0.25}, -0.25)])
async def test_an_illegal_answer_can_end_the_game(args: dict[str, Any], cost: float) -> None:
    games = await play(TTT, {"illegal": "end", **args}, player_1=script("5", "1"), player_2=script("9", "9"))
    assert games["player_1"].rewards == [0, 0]
    assert games["player_2"].rewards == [0, cost]
    assert games["player_1"].metrics == {"illegal": 0, "moves": 2, "won": 1, "lost": 0, "draw": 0}
    assert games["player_2"].metrics == {"illegal": 0.5, "moves": 2, "won": 0, "lost": 1, "draw": 0}
    assert shown(games["player_1"])[-1] == "The answer of player_2 named no legal move. The game is over."


async def test_who_ends_a_simultaneous_game_by_its_answer_has_lost_and_if_all_do_all_have() -> None:
    games = await play(RPS, {"illegal": "end"}, player_0=script("rock", "rock"), player_1=script("rock", "Rocky"))
    assert [games[name].rewards for name in ("player_0", "player_1")] == [[0, 0], [0, -1]]
    assert [games[name].metrics["won"] for name in ("player_0", "player_1")] == [1, 0]
    games = await play(RPS, {"illegal": "end"}, player_0=script(""), player_1=script("?"))
    assert [episode.rewards for episode in games.values()] == [[-1], [-1]]
    assert [episode.metrics["lost"] for episode in games.values()] == [1, 1]


def fingerprint(groups: Any) -> dict[str, Any]:
    return {
        name: [[(e.rewards, e.messages, e.metrics) for e in group.episodes] for group in of_agent]
        for name, of_agent in groups.items()
    }


@pytest.mark.parametrize("name", [TTT, FOUR, RPS])
async def test_equal_seeds_give_equal_games_whatever_is_played_beside_them(name: str) -> None:
    def players(*words: str) -> dict[str, Player]:
        return {agent: one_of(*words) for agent in game_of(name).agents}

    tasks = [{"seed": 4}, {"seed": 5}]
    several = players("1", "5", "rock", "nothing", "7")
    one, other = [fingerprint(await runner(name).run(several, tasks, 8, step=0)) for _ in range(2)]
    assert one == other
    games = fingerprint(await runner(name).run(players("no"), [{"seed": 4}, {"seed": 4}, {"seed": 5}], 1, step=0))
    for first, same, differs in games.values():
        assert first == same != differs


def legal(text: str) -> list[str]:
    """The moves that an observation lists."""
    return text.rpartition("Legal moves: ")[2].split(", ")


def random_game(game: Any, seed: int) -> tuple[dict[str, float], list[str], dict[str, dict[str, float]]]:
    """Legal moves at random to the end: what the game paid each, the moves in order, and the last metrics."""
    numbers, moves = random.Random(seed), []
    first = game.reset({"seed": seed})
    result = first if isinstance(first, MultiStepResult) else MultiStepResult(observations=first)
    earned, metrics = dict.fromkeys(game.agents, 0.0), {agent: dict[str, float]() for agent in game.agents}
    waiting: dict[str, str] = {}
    present, last = list(result.observations), ()
    for _ in range(1000):
        waiting |= {agent: str(text) for agent, text in result.observations.items()}
        turn = checked_turn(game.protocol, Table(game.agents, tuple(present), last, tuple(result.next_agents)))
        said = {agent: Action(numbers.choice(legal(waiting.pop(agent)))) for agent in turn.agents}
        moves += [action.text for action in said.values()]
        result = game.step_together(said) if turn.together else game.step(turn.agents[0], said[turn.agents[0]])
        last = turn.agents
        for name, reward in result.rewards.items():
            assert isinstance(reward, Mapping)
            assert reward["illegal"] == 0
            earned[name] += reward["game"]
        metrics |= {name: dict(news) for name, news in result.metrics.items()}
        present = [name for name in present if name not in result.left]
        if result.done:
            game.close()
            return earned, moves, metrics
    raise AssertionError("the game does not end")


def plainly(env: Any, moves: Sequence[int], seed: int) -> dict[str, float]:
    """What PettingZoo itself gives for the moves."""
    env.reset(seed=seed)
    left, earned = list(moves), dict.fromkeys(env.possible_agents, 0.0)
    for agent in env.agent_iter():
        _, reward, terminated, truncated, _ = env.last()
        earned[agent] += float(reward)
        env.step(None if terminated or truncated else left.pop(0))
    env.close()
    assert not left
    return earned


def square(word: str) -> int:
    """PettingZoo numbers down the columns."""
    row, column = divmod(int(word) - 1, 3)
    return 3 * column + row


GAMES: dict[str, tuple[Any, Callable[[str], int]]] = {
    TTT: (tictactoe_v3, square),
    FOUR: (connect_four_v3, lambda word: int(word) - 1),
    RPS: (rps_v2, ["rock", "paper", "scissors"].index),
}


@pytest.mark.parametrize("name", GAMES)
def test_random_games_end_with_the_rewards_that_pettingzoo_gives_for_the_same_moves(name: str) -> None:
    module, number = GAMES[name]
    outcomes = set()
    for seed in range(200):
        earned, moves, metrics = random_game(game_of(name)(), seed)
        assert earned == plainly(module.env(), [number(word) for word in moves], seed)
        assert sum(earned.values()) == 0
        for agent, numbers in metrics.items():
            sign = (earned[agent] > 0, earned[agent] < 0, earned[agent] == 0)
            assert (numbers["won"], numbers["lost"], numbers["draw"]) == sign
        outcomes.add(tuple(np.sign(list(earned.values()))))
    assert {(1, -1), (-1, 1)} <= outcomes


@pytest.mark.parametrize(("name", "args"), [("classic.chess_v6", {}), ("classic.go_v5", {"board_size": 5})])
def test_chess_and_go_are_played_to_their_end(name: str, args: dict[str, Any]) -> None:
    if "chess" in name:
        pytest.importorskip("chess")
    game: Any = game_of(f"pettingzoo_aec:{name}")
    earned, moves, metrics = random_game(game(**args), seed=2)
    assert sum(earned.values()) == 0
    assert len(moves) > 5
    assert all(numbers["won"] + numbers["lost"] + numbers["draw"] == 1 for numbers in metrics.values())


@pytest.fixture
def games_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent / "games")


async def test_agents_leave_and_the_others_go_on_in_the_games_order(games_of_ours: None) -> None:
    games = await play(OUT, a=script("1"), b=script("0", "1"), c=script("0", "0"))
    assert {name: episode.rewards for name, episode in games.items()} == {"a": [-1], "b": [0.5, -1], "c": [0.5, 1]}
    assert [episode.metrics["won"] for episode in games.values()] == [0, 0, 1]
    assert shown(games["c"])[0] == "You play out_v0 as c.\n\nObservation: 0\nLegal moves: 0, 1"
    assert [text.partition("Observation: ")[2][0] for text in shown(games["c"])] == ["0", "1", "2"], "each sees its own"
    assert "played" not in "".join(text for episode in games.values() for text in shown(episode)), (
        "no codec says it may be told"
    )


def test_rewards_of_many_agents_are_those_of_pettingzoo(games_of_ours: None) -> None:
    make = importlib.import_module("game_of_out").env
    for seed in range(50):
        earned, moves, _ = random_game(game_of(OUT)(), seed)
        assert earned == pytest.approx(plainly(make(), [int(move) for move in moves], seed))


async def test_an_illegal_answer_of_one_of_many_ends_the_game_without_a_winner(games_of_ours: None) -> None:
    games = await play(OUT, {"illegal": "end"}, a=script("1"), b=script("2"), c=script("0"))
    assert {name: episode.rewards for name, episode in games.items()} == {"a": [-1], "b": [-0.5], "c": [0.5]}
    assert games["b"].metrics["lost"] == 1
    assert "won" not in games["c"].metrics


async def test_arguments_that_change_the_agents_need_a_class_that_names_them(games_of_ours: None, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the agents of game_of_out are a, b, not a, b, c") as refused:
        load_environment(OUT).task_source("train", {"players": 2})
    assert "derive a class that sets `agents`" in str(refused.value.hint)
    (tmp_path / "two_are_out.py").write_text(
        "from opentinker.env.adapters.pettingzoo_aec import environment_class\n\n\n"
        "class Two(environment_class('game_of_out')):\n"
        "    agents = ('a', 'b')\n\n"
        "    def __init__(self, **args):\n        super().__init__(players=2, **args)\n"
    )
    games = await play(f"{tmp_path}/two_are_out.py:Two", a=script("1"), b=script("0"))
    assert {name: episode.rewards for name, episode in games.items()} == {"a": [-1], "b": [1]}


async def test_agents_leave_a_simultaneous_game_and_a_mask_in_the_infos_counts(games_of_ours: None) -> None:
    games = await play(AUCTION, a=script("1", "2", "1"), b=script("0"), c=script("2", "1", "1"), task={"seed": 1})
    assert games["b"].rewards == [0]
    assert games["b"].termination is Termination.DONE
    assert shown(games["a"])[0].endswith("Observation: 3\nLegal moves: 0, 1")
    assert shown(games["a"])[2].endswith("Observation: 2\nLegal moves: 0, 1, 2")
    assert shown(games["c"])[1].startswith("Your answer named no legal move: 1 was played for you.")
    assert games["a"].rewards == [0, 1, 0]
    assert games["c"].rewards == pytest.approx([-0.1, 0, 0])
    assert not {"won", "lost", "draw"} & set(games["a"].metrics), "the game's rewards do not sum to zero"


async def test_who_forfeits_has_lost() -> None:
    def breaks(messages: Sequence[Message], numbers: random.Random) -> str:
        raise RuntimeError("no idea")

    for name in (TTT, RPS):
        first, second = game_of(name).agents
        players: dict[str, Player] = {first: one_of("5", "rock"), second: ScriptedPlayer(breaks)}
        groups = await runner(name, on_late="forfeit").run(players, [{"seed": 1}], 1, step=0)
        [episode] = groups[first][0].episodes
        assert episode.metrics["won"] == 1
        # Of the simultaneous game the environment has not seen the first one's action, which is taken back.
        assert shown(episode)[-1].endswith(f"{second} has left. The game is over.")


async def test_the_same_games_are_played_in_processes(tmp_path: Path) -> None:
    for name, adapter in ((TTT, "aec"), (RPS, "parallel")):
        path = tmp_path / f"own_{adapter}.py"
        path.write_text(
            f"from opentinker.env.adapters.pettingzoo_{adapter} import environment_class\n\n\n"
            f"class Own(environment_class('{name.partition(':')[2]}')):\n    execution = 'process'\n"
        )
        players: dict[str, Player] = {agent: one_of("1", "5", "paper", "no") for agent in game_of(name).agents}
        here = fingerprint(await runner(name).run(players, [{"seed": 1}], 2, step=0))
        there = runner(f"{path}:Own")
        try:
            assert fingerprint(await there.run(players, [{"seed": 1}], 2, step=0)) == here
        finally:
            await there.close()


@pytest.mark.parametrize("name", [TTT, RPS])
def test_its_class_travels_by_its_name(name: str) -> None:
    made: type[Environment] = load_environment(name)
    assert made is load_environment(name)
    assert pickle.loads(pickle.dumps(made)) is made
    assert pickle.loads(pickle.dumps(game_of(name))) is game_of(name)
    assert made.__name__ == name


async def test_a_codec_of_ones_own_says_whose_moves_are_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from opentinker.env.adapters.turn_codecs import RockPaperScissorsCodec\n\n\n"
        "class Mine(RockPaperScissorsCodec):\n    moves_are_public = True\n\n"
        "    def board(self, observation):\n        return f'{self.agent} looks'\n"
    )
    args = {"codec": f"{tmp_path}/mine.py:Mine", "max_cycles": 1}
    games = await play(RPS, args, player_0=script("rock"), player_1=script("paper"))
    assert shown(games["player_0"])[1] == "Your opponent played paper.\n\nplayer_0 looks\nThe game is over."


def test_a_codecs_file_does_not_travel_with_a_submitted_job(tmp_path: Path) -> None:
    path = tmp_path / "own_duel.py"
    path.write_text(
        "from opentinker.env.adapters.pettingzoo_aec import environment_class\n\n\n"
        "class Duel(environment_class('classic.tictactoe_v3')):\n    pass\n"
    )
    for name in (TTT, f"{path}:Duel"):
        job = RLJobConfig.model_validate(
            {"environment": {"name": name, "args": {"codec": "mine.py:Mine"}}, "base_model": "any"}
        )
        with pytest.raises(ConfigError, match=r"mine\.py:Mine does not travel with a submitted job"):
            refuse_adapter_functions(job, load_environment(name))


def test_who_lost_its_turn_plays_a_random_legal_move_where_all_move_at_once() -> None:
    games: list[Any] = [game_of(RPS)(), game_of(RPS)()]
    for game in games:
        game.reset({"seed": 8})
    one, same = [game.step_together({"player_0": Action("rock")}) for game in games]
    assert one == same
    assert "Your turn was lost: " in one.observations["player_1"]
    assert "Your turn was lost" not in one.observations["player_0"]
    assert "player_1" not in one.metrics, "it gave no answer"


def test_a_turn_game_does_not_go_on_without_a_move() -> None:
    game: Any = game_of(TTT)()
    game.reset({"seed": 1})
    with pytest.raises(EnvironmentFailedError, match="player_2 moves, and it is the turn of player_1"):
        game.step("player_2", Action("1"))


@pytest.mark.parametrize("name", [TTT, RPS])
def test_who_leaves_has_lost(name: str) -> None:
    game: Any = game_of(name)()
    game.reset({"seed": 1})
    gone, other = game.agents
    result = game.leave(gone)
    assert result.done
    assert (result.metrics[gone]["lost"], result.metrics[other]["won"]) == (1, 1)
    assert result.observations[other] == f"{gone} has left. The game is over."


@pytest.mark.parametrize("name", [TTT, RPS])
@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"illegal": "continue"}, "illegal is 'continue'.*break the order of play"),
        ({"illegal_reward": "much"}, "illegal_reward is 'much'"),
        ({"illegal_reward": float("nan")}, "illegal_reward is nan"),
        ({"size": 4}, "size"),
        ({"opponent": "random"}, "opponent"),
    ],
)
def test_arguments_that_are_wrong_show_before_any_episode(name: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_environment(name).task_source("train", args)


@pytest.mark.parametrize("adapter", ["pettingzoo_aec", "pettingzoo_parallel"])
@pytest.mark.parametrize("name", ["classic.tictactoe_v99", "no_such_module_anywhere", "json"])
def test_a_game_that_does_not_exist_is_refused(adapter: str, name: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=r"classic\.tictactoe_v3"):
        load_environment(f"{adapter}:{name}")


def test_a_turn_game_is_no_simultaneous_one() -> None:
    with pytest.raises(EnvironmentLoadError, match=r"has no parallel_env.*pettingzoo_aec:classic\.tictactoe_v3"):
        load_environment("pettingzoo_parallel:classic.tictactoe_v3")


def test_a_task_without_a_seed_and_a_run_of_one_agent_are_refused() -> None:
    with pytest.raises(EnvironmentFailedError, match="has no seed"):
        game_of(TTT)().reset({})
    with pytest.raises(EnvironmentLoadError, match="is for 2 agents, and here is one"):
        load_for_one(TTT)


@pytest.mark.parametrize("name", [TTT, RPS])
def test_tasks_are_seeds(name: str) -> None:
    source = load_environment(name).task_source("train", {})
    assert source.draw(1, 0, 3) == load_environment(name).task_source("train", {}).draw(1, 0, 3)
    assert load_environment(name).task_source("held_out", {}).size == 100
