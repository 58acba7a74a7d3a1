"""What a chat template does between turns, proved with marker conversations instead of believed.

`probe_turns` plays conversations of three turns, with and without a system message, with and without thinking in the answers.
A template preserves its prefix when every rendering begins with the earlier prompt and answer, unchanged, and when what follows
is the same after any history: only then may a turn be rendered alone and appended to the tokens that were sampled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from opentinker.env.environment import Message
from opentinker.errors import RenderingError

RenderText = Callable[[Sequence[Message], bool], str]
"""(messages, add generation prompt) -> text."""
Encode = Callable[[str], list[int]]

Kind = tuple[str, str]
"""A message's role and what its content consists of, as `chunks.shape_of` says it: "" is a text, "it" an image and a text."""
_ANSWER = "Zanswerq{}z"
_SAID = "Zsaidq{}z"
_TURNS = 3


@dataclass(frozen=True)
class TurnShape:
    """What the probe found for observations of certain roles and contents.

    `opening` are the tokens from the end of the policy's action to the first word of the observation: the turn closer and the
    observation's header. `broken` says how the template fails to preserve its prefix; it is empty when it does.
    """

    opening: tuple[int, ...]
    broken: str = ""


def delta_text(render: RenderText, observation: Sequence[Message]) -> str:
    """What the template adds after an assistant's text: closer, observation, generation prompt.

    Raises:
        RenderingError: the template refuses the messages, or does not show the assistant's text exactly once.
    """
    answer = _ANSWER.format("")
    conversation = [_message("user", _SAID.format("")), _message("assistant", answer), *observation]
    after = render(conversation, True).split(answer)[1:]
    if len(after) != 1:
        raise RenderingError(f"the chat template shows an assistant's text {len(after)} times")
    return after[0]


def probe_turns(render: RenderText, encode: Encode, kinds: Sequence[Kind], placeholder: str = "") -> TurnShape:
    """The shape of a turn whose observation has messages of these kinds; `placeholder` is what stands for an image.

    Raises:
        RenderingError: the template refuses such a conversation even without system message and thinking.
    """
    observation = [_message(role, _SAID.format(i), shape) for i, (role, shape) in enumerate(kinds)]
    first = placeholder if placeholder and kinds and kinds[0][1].startswith("i") else _SAID.format(0)
    opening, said, _ = delta_text(render, observation).partition(first)
    broken = "" if said else "an observation's text does not follow the answer"
    for system, thinking in ((False, False), (True, False), (False, True)):
        try:
            broken = broken or _first_break(render, encode, kinds, system, thinking)
        except RenderingError:
            if not system and not thinking:
                raise
    return TurnShape(tuple(encode(opening)), broken)


def _first_break(render: RenderText, encode: Encode, kinds: Sequence[Kind], system: bool, thinking: bool) -> str:
    messages = [_message("system", "Zsystemqz")] if system else []
    where = f"in a conversation {'with' if system else 'without'} a system message{', with thinking' if thinking else ''}"
    before = answer = ""
    for turn in range(_TURNS):
        now = kinds if turn else (("user", ""),)
        said = [_message(role, _SAID.format(f"{turn}t{i}"), shape) for i, (role, shape) in enumerate(now)]
        messages += said
        prompt = render(messages, True)
        if turn:
            # Space around an answer is the policy's own: some templates put one there in their history, others trim it.
            rest = prompt[len(before) :].lstrip()
            if not prompt.startswith(before) or not rest.startswith(answer):
                return f"turn {turn + 1} changes what came before it {where}"
            added = rest.removeprefix(answer)
            if added != delta_text(render, said):
                return f"what turn {turn + 1} adds depends on the history {where}"
            delta = encode(added)
            if encode(prompt)[-len(delta) :] != delta:
                return f"the tokens of turn {turn + 1} depend on the history {where}"
        answer = _ANSWER.format(turn)
        if thinking:
            answer = f"<think>\nZthoughtq{turn}z\n</think>\n\n{answer}"
        messages.append(_message("assistant", answer))
        before = prompt
    return ""


def _message(role: str, text: str, shape: str = "") -> Message:
    """A message that says `text`; of an image the template needs no more than that it is one."""
    if not shape:
        return {"role": role, "content": text}
    parts = [{"type": "text", "text": text} if kind == "t" else {"type": "image"} for kind in shape]
    return cast(Message, {"role": role, "content": parts})
