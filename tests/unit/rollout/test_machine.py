"""The machine of an episode: its table row by row, and its promises about tokens under any sequence of events."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from opentinker.client.messages import Sample
from opentinker.env.environment import Action, Message, Tool
from opentinker.errors import RenderingError
from opentinker.rendering.chunks import NO_IMAGES, Images
from opentinker.rollout.machine import (
    ActionSampled,
    AwaitTurn,
    Cancelled,
    DeadlinePassed,
    EpisodeEnded,
    EpisodeMachine,
    Event,
    Failed,
    Finalize,
    Finalized,
    Finish,
    Generate,
    Reset,
    ResetDone,
    Step,
    StepDone,
    TurnGranted,
    TurnLost,
)
from opentinker.rollout.trajectory import RunKind
from opentinker.rollout.types import EpisodeStatus, Termination

STOP, HEADER, CLOSER = 1, 2, 3


class LetterRenderer:
    """One token per letter; a turn is letters, CLOSER (or the sampled STOP), and HEADER opens the policy's turn."""

    def __init__(self, keeps_prefix: bool = True) -> None:
        self.keeps_prefix = keeps_prefix

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> list[int]:
        if any(m["content"] == "unspeakable" for m in messages):
            raise RenderingError("the template has no word for it")
        return [t for m in messages for t in [*map(ord, m["content"]), CLOSER]] + [HEADER]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        stopped = action_tokens[-1] == STOP
        return Action("".join(chr(t) for t in action_tokens if t != STOP), truncated=not (stopped or finished))

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> list[int]:
        if not self.keeps_prefix:
            raise RenderingError("changes earlier turns")
        return ([] if action_tokens[-1] == STOP else [CLOSER]) + self.render_prompt(observation)


def user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


def sampled(text: str, *, stop: bool = True, logprob: float = -0.5) -> ActionSampled:
    tokens = np.array([*map(ord, text), *([STOP] if stop else [])], np.int32)
    logprobs = np.full(len(tokens), logprob, np.float32)
    return ActionSampled(Sample(tokens, logprobs, "stop" if stop else "length", ((0, len(tokens)),)))


def machine(keeps_prefix: bool = True, waits: bool = False, max_turns: int = 2, room: int = 40) -> EpisodeMachine:
    renderer = LetterRenderer(keeps_prefix)
    return EpisodeMachine(renderer, "task", max_turns=max_turns, max_action_tokens=8, max_model_len=room, waits_for_turn=waits)


RESET = ResetDone(user("hi"))
ACT = sampled("go")
GOES_ON = StepDone(0.5, False, user("next"))
DONE = StepDone(1.0, True, metrics={"exact": 1.0})
LAST, TOO_LONG = ResetDone(user("hi"), finalizes=True), StepDone(0, False, user("x" * 40))
LATE, BROKEN = DeadlinePassed("too late"), Failed("it broke")

TABLE: dict[str, tuple[list[Event], Termination]] = {
    "reset failed": ([BROKEN], Termination.ERROR_ENV),
    "reset too late": ([LATE], Termination.ERROR_TIMEOUT),
    "the first observation fills the context": ([ResetDone(user("x" * 38))], Termination.TRUNCATED_CONTEXT),
    "an observation fills the context": ([RESET, ACT, StepDone(0, False, user("x" * 40))], Termination.TRUNCATED_CONTEXT),
    "the template refuses the observation": ([ResetDone(user("unspeakable"))], Termination.ERROR_ENV),
    "the template refuses a later observation": ([RESET, ACT, StepDone(0, False, user("unspeakable"))], Termination.ERROR_ENV),
    "the engine failed": ([RESET, BROKEN], Termination.ERROR_GENERATION),
    "the engine was too late": ([RESET, LATE], Termination.ERROR_TIMEOUT),
    "the engine said nothing": ([RESET, sampled("", stop=False)], Termination.ERROR_GENERATION),
    "the engine said more than was asked": ([RESET, sampled("x" * 9)], Termination.ERROR_GENERATION),
    "a logprob is NaN": ([RESET, sampled("go", logprob=float("nan"))], Termination.ERROR_GENERATION),
    "the environment is done": ([RESET, ACT, DONE], Termination.DONE),
    "done on the last turn": ([RESET, ACT, GOES_ON, ACT, DONE], Termination.DONE),
    "no turns left": ([RESET, ACT, GOES_ON, ACT, GOES_ON], Termination.TRUNCATED_TURNS),
    "the environment raised": ([RESET, ACT, BROKEN], Termination.ERROR_ENV),
    "a step was too late": ([RESET, ACT, LATE], Termination.ERROR_TIMEOUT),
    "done, with a last reward": ([LAST, ACT, DONE, Finalized(0.5)], Termination.DONE),
    "no turns left, with a last reward": ([LAST, ACT, GOES_ON, ACT, GOES_ON, Finalized(-1.0)], Termination.TRUNCATED_TURNS),
    "a full context, with a last reward": ([LAST, ACT, TOO_LONG, Finalized(0.0)], Termination.TRUNCATED_CONTEXT),
    "no turn, no last reward": ([ResetDone(user("x" * 38), finalizes=True)], Termination.TRUNCATED_CONTEXT),
    "the last reward raised": ([LAST, ACT, DONE, BROKEN], Termination.ERROR_ENV),
    "the last reward was too late": ([LAST, ACT, DONE, LATE], Termination.ERROR_TIMEOUT),
    "cancelled while pending": ([Cancelled()], Termination.CANCELLED),
    "cancelled while generating": ([RESET, Cancelled()], Termination.CANCELLED),
    "cancelled while interacting": ([RESET, ACT, Cancelled()], Termination.CANCELLED),
}


@pytest.mark.parametrize("keeps_prefix", [True, False])
@pytest.mark.parametrize("row", TABLE)
def test_recorded_events_end_as_the_table_says(row: str, keeps_prefix: bool) -> None:
    events, termination = TABLE[row]
    subject = machine(keeps_prefix)
    for event in events:
        assert subject.status is not EpisodeStatus.TERMINATED
        request = subject.handle(event)
    assert request == Finish(termination)
    assert subject.status is EpisodeStatus.TERMINATED
    assert bool(subject.error) == (termination.is_error or termination is Termination.TRUNCATED_CONTEXT)


def test_an_episode_asks_for_one_thing_after_the_other() -> None:
    subject = machine()
    assert (subject.pending, subject.status) == (Reset("task"), EpisodeStatus.PENDING)
    request = subject.handle(RESET)
    assert isinstance(request, Generate)
    assert (request.tokens.tolist(), request.max_tokens) == ([*map(ord, "hi"), CLOSER, HEADER], 8)
    assert subject.status is EpisodeStatus.GENERATING
    assert subject.handle(ACT) == Step(Action("go"))
    assert subject.status is EpisodeStatus.INTERACTING
    request = subject.handle(GOES_ON)
    assert isinstance(request, Generate)
    assert request.tokens.tolist() == [
        *map(ord, "hi"),
        CLOSER,
        HEADER,
        *map(ord, "go"),
        STOP,
        *map(ord, "next"),
        CLOSER,
        HEADER,
    ]
    subject.handle(sampled("again"))
    subject.handle(StepDone(1.0, True, user("bravo"), {"exact": 1.0}))
    assert [m["content"] for m in subject.messages] == ["hi", "go", "next", "again", "bravo"]
    assert subject.rewards == [0.5, 1.0]
    assert subject.metrics == {"exact": 1.0}
    assert [r.kind for r in subject.trajectories[0].runs] == [
        RunKind.PROMPT,
        RunKind.ACTION,
        RunKind.OBSERVATION,
        RunKind.ACTION,
    ], "the last observation is not trained on"


def test_a_cut_action_is_closed_outside_the_loss_and_no_stop_token_is_invented() -> None:
    subject = machine()
    subject.handle(RESET)
    assert subject.handle(sampled("go", stop=False)) == Step(Action("go", truncated=True))
    subject.handle(GOES_ON)
    (trajectory,) = subject.trajectories
    closer = trajectory.tokens.tolist().index(CLOSER, 4)
    assert trajectory.loss_mask[closer] == 0
    assert STOP not in trajectory.tokens


def test_an_action_gets_the_room_that_is_left_and_at_least_one_token() -> None:
    request = machine(room=5).handle(RESET)
    assert isinstance(request, Generate)
    assert request.max_tokens == 1
    assert machine(room=4).handle(RESET) == Finish(Termination.TRUNCATED_CONTEXT)


def test_a_template_that_breaks_its_prefix_gives_one_trajectory_per_turn() -> None:
    subject = machine(keeps_prefix=False)
    for event in (RESET, ACT, GOES_ON, ACT, DONE):
        subject.handle(event)
    assert len(subject.trajectories) == 2
    assert subject.prefix_breaks == 1
    second = subject.trajectories[1].runs[0]
    assert second.tokens.tolist() == [*map(ord, "hi"), CLOSER, *map(ord, "go"), CLOSER, *map(ord, "next"), CLOSER, HEADER]


def test_in_a_shared_episode_the_turn_must_be_granted() -> None:
    subject = machine(waits=True)
    assert subject.handle(RESET) == AwaitTurn()
    assert subject.status is EpisodeStatus.PENDING
    assert isinstance(subject.handle(TurnGranted()), Generate)
    subject.handle(ACT)
    assert subject.handle(GOES_ON) == AwaitTurn()
    assert subject.handle(EpisodeEnded()) == Finish(Termination.DONE)


def test_what_is_shown_and_earned_while_others_act_belongs_to_the_next_and_the_last_turn() -> None:
    subject = machine(waits=True, room=200, max_turns=9)
    subject.handle(RESET)
    first = subject.handle(TurnGranted(user("white: a1"), reward=0.25, components={"early": 0.25}))
    assert isinstance(first, Generate)
    assert first.tokens.tolist() == [*map(ord, "hi"), CLOSER, *map(ord, "white: a1"), CLOSER, HEADER]
    subject.handle(ACT)
    subject.handle(StepDone(0.5, False))
    assert subject.rewards == [0.75], "what it earned before it acted is its first action's"
    second = subject.handle(TurnGranted(user("white: b2"), reward=-1.0))
    assert isinstance(second, Generate)
    assert subject.rewards == [-0.25]
    subject.handle(ACT)
    subject.handle(GOES_ON)
    end = EpisodeEnded(user("white wins"), -1.0, {"outcome": -1.0}, {"won": 0.0}, Termination.DONE)
    assert subject.handle(end) == Finish(Termination.DONE)
    assert subject.rewards == [-0.25, -0.5]
    assert subject.components == {"early": 0.25, "outcome": -1.0}
    assert subject.metrics == {"won": 0.0}
    assert [m["content"] for m in subject.messages[-2:]] == ["next", "white wins"]


def test_an_agent_whose_action_is_not_done_when_the_episode_ends_keeps_its_earlier_ones() -> None:
    ends = []
    for events in ([], [ACT]):
        subject = machine(waits=True, room=200, max_turns=9)
        for event in (RESET, TurnGranted(), ACT, GOES_ON, TurnGranted(), *events):
            subject.handle(event)
        assert subject.handle(EpisodeEnded(reward=-2.0)) == Finish(Termination.DONE)
        assert subject.rewards == [0.5 - 2.0], "an action that the environment never saw earned nothing"
        assert sum(t.actions for t in subject.trajectories) == 1
        ends.append(([t.tokens.tolist() for t in subject.trajectories], subject.messages))
    assert ends[0] == ends[1], "it is as if it had not been sampled"


def test_who_only_said_what_the_environment_never_saw_has_nothing_to_learn_from() -> None:
    subject = machine(waits=True)
    for event in (RESET, TurnGranted(), ACT, EpisodeEnded(reward=-2.0)):
        subject.handle(event)
    assert (subject.rewards, subject.early_reward) == ([], -2.0)
    assert sum(t.action_tokens for t in subject.trajectories) == 0


@pytest.mark.parametrize("keeps_prefix", [True, False])
@pytest.mark.parametrize("turns", [0, 1])
def test_a_turn_that_is_lost_is_as_if_it_had_not_been_granted(turns: int, keeps_prefix: bool) -> None:
    def played(*lost: Event) -> EpisodeMachine:
        subject = machine(keeps_prefix, waits=True, room=200, max_turns=9)
        subject.handle(RESET)
        for _ in range(turns):
            for event in (TurnGranted(user("other")), ACT, GOES_ON):
                subject.handle(event)
        for event in lost:
            subject.handle(event)
        subject.handle(TurnGranted(user("again")))
        return subject

    whole = played()
    late = played(TurnGranted(), TurnLost(), TurnGranted(), TurnLost())
    assert [t.tokens.tolist() for t in late.trajectories] == [t.tokens.tolist() for t in whole.trajectories]
    assert isinstance(late.pending, Generate)
    assert (late.messages, late.prefix_breaks, late.rewards) == (whole.messages, whole.prefix_breaks, whole.rewards)


def test_an_agent_that_was_shown_nothing_cannot_act() -> None:
    subject = machine(waits=True)
    for event in (RESET, TurnGranted(), ACT, StepDone(0.0, False)):
        subject.handle(event)
    assert subject.handle(TurnGranted()) == Finish(Termination.ERROR_ENV)
    assert "shown nothing" in subject.error


@pytest.mark.parametrize(("event", "end"), [(BROKEN, Termination.ERROR_ENV), (LATE, Termination.ERROR_TIMEOUT)])
def test_waiting_for_a_turn_can_fail(event: Event, end: Termination) -> None:
    subject = machine(waits=True)
    subject.handle(RESET)
    assert subject.handle(event) == Finish(end)


SHARED: list[Event] = [TurnGranted(), TurnLost(), EpisodeEnded()]
EVENTS: list[Event] = [RESET, *SHARED, ACT, GOES_ON, Finalized(1.0), LATE, BROKEN, Cancelled()]
LEGAL: dict[type, tuple[type, ...]] = {
    Reset: (ResetDone, DeadlinePassed, Failed, Cancelled),
    AwaitTurn: (TurnGranted, EpisodeEnded, DeadlinePassed, Failed, Cancelled),
    Generate: (ActionSampled, TurnLost, EpisodeEnded, DeadlinePassed, Failed, Cancelled),
    Step: (StepDone, EpisodeEnded, DeadlinePassed, Failed, Cancelled),
    Finalize: (Finalized, EpisodeEnded, DeadlinePassed, Failed, Cancelled),
    Finish: (),
}


@pytest.mark.parametrize(
    "prefix",
    [[], [RESET], [RESET, TurnGranted()], [RESET, TurnGranted(), ACT], [LAST, TurnGranted(), ACT, DONE], [Cancelled()]],
)
@pytest.mark.parametrize("event", EVENTS, ids=lambda e: type(e).__name__)
def test_events_that_do_not_fit_raise_and_change_nothing(prefix: list[Event], event: Event) -> None:
    subject = machine(waits=True)
    for earlier in prefix:
        subject.handle(earlier)
    pending = subject.pending
    if isinstance(event, LEGAL[type(pending)]):
        subject.handle(event)
    else:
        with pytest.raises(ValueError, match="cannot follow"):
            subject.handle(event)
        assert subject.pending is pending


def test_errors_and_cancellation_never_train_and_truncation_does() -> None:
    for termination in Termination:
        assert not (termination.is_error and termination.trains)
        assert termination.trains == (str(termination) == "done" or str(termination).startswith("truncated"))


texts = st.text("abc", max_size=6)


class AnyEpisode(RuleBasedStateMachine):
    """Whatever happens in whatever order, the tokens keep their promises."""

    @initialize(keeps=st.booleans(), waits=st.booleans(), turns=st.integers(1, 4), room=st.integers(3, 60))
    def begin(self, keeps: bool, waits: bool, turns: int, room: int) -> None:
        self.subject = machine(keeps, waits, turns, room)
        self.room, self.waits = room, waits
        self.said: list[list[int]] = []
        self.prompts: list[list[int]] = []
        self.ended: Finish | None = None

    def handle(self, event: Event) -> None:
        request = self.subject.handle(event)
        if isinstance(request, Generate):
            self.prompts.append(request.tokens.tolist())
            assert 1 <= request.max_tokens <= self.room - len(request.tokens)

    def waiting(self, kind: type) -> bool:
        return isinstance(self.subject.pending, kind)

    @precondition(lambda self: self.waiting(Reset))
    @rule(text=texts, finalizes=st.booleans())
    def reset(self, text: str, finalizes: bool) -> None:
        self.handle(ResetDone(user(text), finalizes=finalizes))

    @precondition(lambda self: self.waiting(Finalize))
    @rule(reward=st.floats(-1, 1))
    def finalize(self, reward: float) -> None:
        before = sum(self.subject.rewards) + self.subject.early_reward
        self.handle(Finalized(reward, {"last": reward}))
        assert sum(self.subject.rewards) + self.subject.early_reward == pytest.approx(before + reward)
        assert self.subject.components == {"last": reward}

    @precondition(lambda self: self.waiting(AwaitTurn))
    @rule(text=texts)
    def grant(self, text: str) -> None:
        self.handle(TurnGranted(user(text)))

    @precondition(lambda self: self.waiting(Generate))
    @rule(text=st.text("abc", min_size=1, max_size=8), stop=st.booleans())
    def act(self, text: str, stop: bool) -> None:
        pending = self.subject.pending
        assert isinstance(pending, Generate)
        event = sampled(text, stop=stop)
        self.handle(event)
        if self.waiting(Step):
            self.said.append(event.sample.tokens.tolist())
        else:
            assert len(event.sample.tokens) > pending.max_tokens

    @precondition(lambda self: self.waiting(Step))
    @rule(text=texts, done=st.booleans(), reward=st.floats(-1, 1))
    def step(self, text: str, done: bool, reward: float) -> None:
        self.handle(StepDone(reward, done, user(text)))

    @rule(event=st.sampled_from([LATE, BROKEN, Cancelled(), EpisodeEnded()]))
    def end(self, event: Event) -> None:
        shared = self.waits or not isinstance(event, EpisodeEnded)
        if shared and isinstance(event, LEGAL[type(self.subject.pending)]):
            if isinstance(event, EpisodeEnded) and self.waiting(Step):
                self.said.pop()  # the environment never saw it
            self.handle(event)
            if isinstance(event, EpisodeEnded):
                assert sum(t.actions for t in self.subject.trajectories) == len(self.subject.rewards)

    @invariant()
    def a_token_is_in_the_loss_if_and_only_if_it_was_sampled_and_has_a_logprob(self) -> None:
        sampled_runs = []
        for trajectory in self.subject.trajectories:
            mask = trajectory.loss_mask.astype(bool)
            assert ((trajectory.behaviour_logprobs != 0) == mask).all()
            in_loss = trajectory.tokens[mask].tolist()
            runs = [r.tokens.tolist() for r in trajectory.runs if r.sample is not None]
            assert in_loss == [t for run in runs for t in run]
            sampled_runs += runs
        assert sampled_runs == self.said

    @invariant()
    def every_prompt_is_the_concatenation_of_all_earlier_runs(self) -> None:
        seen = []
        for trajectory in self.subject.trajectories:
            for index, run in enumerate(trajectory.runs):
                if run.kind is not RunKind.ACTION:
                    seen.append([t for r in trajectory.runs[: index + 1] for t in r.tokens.tolist()])
        # Before a granted turn, and after one that never came, the last prompt is there but was not asked for.
        assert seen[: len(self.prompts)] == self.prompts
        assert len(seen) - len(self.prompts) in (0, 1)

    @invariant()
    def the_context_is_never_exceeded(self) -> None:
        assert all(len(t) <= self.room for t in self.subject.trajectories)

    @invariant()
    def an_end_is_final(self) -> None:
        if self.ended is None and isinstance(self.subject.pending, Finish):
            self.ended = self.subject.pending
        if self.ended is not None:
            assert self.subject.pending is self.ended
            with pytest.raises(ValueError, match="cannot follow"):
                self.subject.handle(ACT)


TestAnyEpisode = AnyEpisode.TestCase
TestAnyEpisode.settings = settings(max_examples=150, stateful_step_count=15, deadline=None)
