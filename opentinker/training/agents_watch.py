"""Watches a run of several agents: each learner's steps, and the score of one agent or of all who learn."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from opentinker.config.rl import EvaluationConfig, StopConfig
from opentinker.errors import ConfigError
from opentinker.training.trend import Verdict
from opentinker.training.watch import Watch, score


class AgentsWatch:
    """As `Watch`, for rows of all agents. A run is judged by the evaluation, or the training, of the agent that the config
    names, whose policy is that of the learner `player`, if it is one's; or else by the mean over `learners`."""

    def __init__(self, stop: StopConfig, evaluation: EvaluationConfig, learners: Sequence[str], player: str = "") -> None:
        self._evaluation = evaluation
        self._learners = tuple(learners)
        self._player = player
        whose = f" of '{evaluation.agent}'" if evaluation.agent else f" (mean of {', '.join(learners)})"
        self._watch = Watch(stop, evaluation.metric, whose)

    def score(self, row: Mapping[str, Any]) -> float | None:
        """What the run is judged by, of a row of kind `agents_evaluation`; None if nobody reports it."""
        return _mean(score(agent, self._evaluation.metric) for agent in self._judged(row))

    def checked(self, row: Mapping[str, Any]) -> float | None:
        """The score, which has to be there if anything is done about it.

        Raises:
            ConfigError: it is not.
        """
        value = self.score(row)
        if value is None and (self._evaluation.keep_best or self._watch.needs_score):
            who = self._evaluation.agent or "those who learn"
            there = sorted({name for agent in row["agents"].values() for name in agent["env"]})
            raise ConfigError(
                f"evaluation.metric: no held-out episode of {who} reports '{self._evaluation.metric or 'reward'}'",
                hint=f"there are {', '.join(['reward', *there])}, of {', '.join(row['agents']) or 'nobody'}",
            )
        return value

    def improves(self, row: Mapping[str, Any]) -> bool:
        """Whether this evaluation is better than all before it. Ask before `row` sees it."""
        return self._watch.better(self.score(row))

    def row(self, row: Mapping[str, Any]) -> list[tuple[Verdict, tuple[str, ...]]]:
        """What the row shows that is to be acted on, and for which learners."""
        match row["kind"]:
            case "agents_evaluation":
                return self._concerning_player(self._watch.scored(self.score(row)))
            case "agents_step":
                reward = _mean(agent["reward_mean"] for agent in self._judged(row))
                return [*self._concerning_player(self._watch.earned(reward)), *self._beyond(row)]
        return []

    def _judged(self, row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The parts of a row of those by whom the run is judged."""
        names = [self._evaluation.agent] if self._evaluation.agent else self._learners
        return [row["agents"][name] for name in names if name in row["agents"]]

    def _concerning_player(self, verdict: Verdict | None) -> list[tuple[Verdict, tuple[str, ...]]]:
        return [] if verdict is None else [(verdict, (self._player,) if self._player else ())]

    def _beyond(self, row: Mapping[str, Any]) -> Iterator[tuple[Verdict, tuple[str, ...]]]:
        for name in self._learners:
            agent = row["agents"].get(name)
            verdict = None if agent is None else self._watch.beyond({**agent, "step": row["step"]})
            if verdict is not None:
                yield Verdict(f"'{name}': {verdict.reason}", verdict.final), (name,)

    def state(self) -> dict[str, Any]:
        """What `restore` takes."""
        return self._watch.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        if state:
            self._watch.restore(state)


def _mean(values: Iterable[float | None]) -> float | None:
    """Of those that are there."""
    there = [value for value in values if value is not None]
    return sum(there) / len(there) if there else None
