"""What is learnt of a conversation is what a policy would have sampled: nothing more, nothing less."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from opentinker.env.environment import Message
from opentinker.errors import RenderingError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.supervised import Supervised, SupervisedRenderer
from opentinker.rendering.tokenizer import ChatTokenizer

STOPS = {
    "smollm2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "thinks_first": "<|im_end|>",
}
CHAT: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "3 + 4"},
    {"role": "assistant", "content": "7"},
    {"role": "user", "content": "and 5?"},
    {"role": "assistant", "content": "It is 12."},
]


@pytest.fixture
def make(make_tokenizer: Callable[[str], ChatTokenizer]) -> Callable[[str], ConversationRenderer]:
    def renderer(family: str) -> ConversationRenderer:
        tokenizer = make_tokenizer(family)
        return ConversationRenderer(tokenizer, [tokenizer.convert_tokens_to_ids(STOPS[family]) or 0])

    return renderer


def learnt(renderer: ConversationRenderer, sequence: Supervised) -> str:
    return renderer.tokenizer.decode(sequence.tokens[sequence.mask > 0].tolist())


@pytest.mark.parametrize("family", ["smollm2", "llama3"])
def test_every_answer_is_learnt_with_the_token_that_ends_it(make: Any, family: str) -> None:
    renderer = make(family)
    [sequence] = SupervisedRenderer(renderer).render(CHAT)
    assert learnt(renderer, sequence) == f"7{STOPS[family]}It is 12.{STOPS[family]}"
    [last] = SupervisedRenderer(renderer).render(CHAT, loss_on="last")
    assert learnt(renderer, last) == f"It is 12.{STOPS[family]}"
    [everything] = SupervisedRenderer(renderer).render(CHAT, loss_on="all")
    assert everything.learnt == len(everything.tokens) - 1 == everything.to_datum().weights.sum()
    [answered] = SupervisedRenderer(renderer).render(CHAT, loss_on="all", prompt=2)
    behind_the_prompt = learnt(renderer, answered)
    assert behind_the_prompt.startswith(f"7{STOPS[family]}")
    assert "and 5?" in behind_the_prompt
    assert "3 + 4" not in behind_the_prompt


@pytest.mark.parametrize("family", ["smollm2", "llama3"])
def test_the_tokens_are_those_of_a_rollout_of_the_same_conversation(make: Any, family: str) -> None:
    renderer = make(family)
    encode, stop = renderer.tokenizer.encode, STOPS[family]
    first, second = encode(f"7{stop}"), encode(f"It is 12.{stop}")
    rollout = renderer.render_prompt(CHAT[:2]) + first + renderer.observation_delta(first, CHAT[3:4]) + second
    [sequence] = SupervisedRenderer(renderer).render(CHAT)
    assert sequence.tokens.tolist()[: len(rollout)] == rollout
    assert not sequence.mask[len(rollout) :].any()


def test_a_template_that_changes_earlier_turns_gives_one_sequence_per_answer(make: Any) -> None:
    renderer = make("qwen3")
    thinking = [*CHAT[:2], {"role": "assistant", "content": "<think>\neasy\n</think>\n\n7"}, *CHAT[3:]]
    first, second = SupervisedRenderer(renderer).render(thinking)
    assert learnt(renderer, first) == "<think>\neasy\n</think>\n\n7<|im_end|>"
    assert learnt(renderer, second) == "It is 12.<|im_end|>"
    assert "easy" not in renderer.tokenizer.decode(second.tokens.tolist())
    whole, rest = SupervisedRenderer(renderer).render(thinking, loss_on="all")
    assert whole.learnt == len(whole.tokens) - 1
    assert learnt(renderer, rest) == "It is 12.<|im_end|>", "what both have is learnt once"


def test_a_prompt_is_not_learnt_even_if_it_holds_answers(make: Any) -> None:
    renderer = make("smollm2")
    [sequence] = SupervisedRenderer(renderer).render(CHAT, prompt=4)
    assert learnt(renderer, sequence) == "It is 12.<|im_end|>"


def test_what_follows_the_last_answer_is_left_out(make: Any) -> None:
    renderer = make("smollm2")
    [sequence] = SupervisedRenderer(renderer).render([*CHAT, {"role": "user", "content": "Thanks"}])
    assert "Thanks" not in renderer.tokenizer.decode(sequence.tokens.tolist())


def test_a_datum_has_its_weights_on_the_targets(make: Any) -> None:
    renderer = make("smollm2")
    [sequence] = SupervisedRenderer(renderer).render(CHAT)
    datum = sequence.to_datum()
    assert renderer.tokenizer.decode(datum.targets[datum.weights > 0].tolist()) == learnt(renderer, sequence)


@pytest.mark.parametrize(
    ("family", "messages", "says"),
    [
        ("smollm2", CHAT[:2], "no assistant turn to learn"),
        ("thinks_first", CHAT, "cannot mark assistant tokens: it renders an assistant's turn otherwise than it opens one"),
        ("mistral", [CHAT[0], *CHAT[1:]], "the chat template refuses"),
    ],
)
def test_what_cannot_be_learnt_is_an_error(make: Any, family: str, messages: list[Message], says: str) -> None:
    with pytest.raises(RenderingError, match=says):
        SupervisedRenderer(make(family)).render(messages)


def test_a_template_that_ends_no_turn_or_changes_an_answer_is_an_error(files: dict[str, bytes]) -> None:
    def renderer(template: str) -> SupervisedRenderer:
        tokenizer = ChatTokenizer.from_files({**files, "chat_template.jinja": template.encode()})
        return SupervisedRenderer(ConversationRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>") or 0]))

    endless = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    with pytest.raises(RenderingError, match="does not end an assistant's turn with a stop token"):
        renderer(endless).render(CHAT)
    shouting = endless.replace("{{ m.content }}", "{{ m.content | upper }}<|im_end|>")
    with pytest.raises(RenderingError, match=r"changes what the assistant says: 'It is 12.' became 'IT IS 12."):
        renderer(shouting).render(CHAT[3:])


texts = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=12).map(lambda t: f"x{t.strip()}")


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4))
def test_exactly_the_answers_come_back_from_the_mask(make: Any, turns: list[tuple[str, str]]) -> None:
    renderer = make("llama3")
    messages = [
        m for said, answer in turns for m in ({"role": "user", "content": said}, {"role": "assistant", "content": answer})
    ]
    [sequence] = SupervisedRenderer(renderer).render(messages)
    assert learnt(renderer, sequence) == "".join(f"{answer}<|eot_id|>" for _, answer in turns)
