"""Golden tokens: what is rendered for a first turn, after it, and which templates may not be appended to."""

from collections.abc import Callable
from typing import Any

import pytest

from opentinker.env.environment import Message
from opentinker.errors import RenderingError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer

MakeRenderer = Callable[..., ConversationRenderer]
STOPS = {
    "smollm2": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "mistral": "</s>",
    "thinks_first": "<|im_end|>",
}
KEEPING = ("smollm2", "llama3")
FIRST: list[Message] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3 + 4"}]
NEXT: list[Message] = [{"role": "user", "content": "Wrong."}]


@pytest.fixture
def make_renderer(make_tokenizer: Callable[[str], ChatTokenizer]) -> MakeRenderer:
    def make(family: str, **template_kwargs: Any) -> ConversationRenderer:
        tokenizer = make_tokenizer(family)
        stop = tokenizer.convert_tokens_to_ids(STOPS[family])
        assert stop is not None
        return ConversationRenderer(tokenizer, [stop], template_kwargs)

    return make


def test_smollm2_prompt(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("smollm2")
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n3 + 4<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.render_prompt(FIRST) == renderer.tokenizer.encode(expected)
    assert "You are SmolLM" in renderer.tokenizer.decode(renderer.render_prompt(FIRST[1:]))


@pytest.mark.parametrize(
    ("family", "after_the_stop_token"),
    [
        ("smollm2", "\n<|im_start|>user\nWrong.<|im_end|>\n<|im_start|>assistant\n"),
        (
            "llama3",
            "<|start_header_id|>user<|end_header_id|>\n\nWrong.<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
    ],
)
def test_the_delta_holds_the_rest_of_the_turn_the_observation_and_the_next_header(
    make_renderer: MakeRenderer, family: str, after_the_stop_token: str
) -> None:
    renderer = make_renderer(family)
    encode = renderer.tokenizer.encode
    stop = STOPS[family]
    assert renderer.observation_delta(encode(f"7{stop}"), NEXT) == encode(after_the_stop_token)
    assert renderer.observation_delta(encode("7"), NEXT) == encode(stop + after_the_stop_token), "a cut turn is closed"


@pytest.mark.parametrize("family", KEEPING)
def test_appending_gives_the_tokens_of_a_full_rendering_at_every_turn(make_renderer: MakeRenderer, family: str) -> None:
    renderer = make_renderer(family)
    assert renderer.preserves_prefix
    messages = list(FIRST)
    tokens = renderer.render_prompt(messages)
    for turn in range(4):
        action = renderer.tokenizer.encode(f"guess {turn}" + (STOPS[family] if turn % 2 else ""))
        observation: list[Message] = [{"role": "user", "content": f"reply {turn}"}]
        tokens = tokens + action + renderer.observation_delta(action, observation)
        messages += [{"role": "assistant", "content": f"guess {turn}"}, *observation]
        assert tokens == renderer.render_prompt(messages)


def test_an_observation_may_be_several_messages(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("smollm2")
    observation: list[Message] = [{"role": "tool", "content": "42"}, {"role": "user", "content": "go on"}]
    delta = renderer.tokenizer.decode(renderer.observation_delta(renderer.tokenizer.encode("7<|im_end|>"), observation))
    assert delta == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"


def test_the_whole_closer_follows_an_action_that_ended_with_another_stop_token(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("smollm2")
    encode = renderer.tokenizer.encode
    other = ConversationRenderer(renderer.tokenizer, [*renderer.stop_token_ids, *encode("</s>")])
    assert other.observation_delta(encode("7</s>"), NEXT)[: len(encode("<|im_end|>\n"))] == encode("<|im_end|>\n")


def test_a_template_that_strips_thinking_from_earlier_turns_is_detected_and_refused(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("qwen3")
    assert not renderer.preserves_prefix
    assert "thinking" in renderer.prefix_break
    with pytest.raises(RenderingError, match="does not preserve its prefix"):
        renderer.observation_delta(renderer.tokenizer.encode("7<|im_end|>"), NEXT)


@pytest.mark.parametrize(("family", "kwargs"), [("thinks_first", {}), ("qwen3", {"enable_thinking": False})])
def test_a_header_that_history_does_not_repeat_is_detected(
    make_renderer: MakeRenderer, family: str, kwargs: dict[str, Any]
) -> None:
    assert "changes what came before" in make_renderer(family, **kwargs).prefix_break


def test_a_space_that_a_template_puts_before_answers_is_left_to_the_policy(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("mistral")
    assert renderer.preserves_prefix
    encode = renderer.tokenizer.encode
    tokens = renderer.render_prompt(FIRST[1:])
    tokens += encode(" 7</s>") + renderer.observation_delta(encode(" 7</s>"), NEXT)
    assert tokens == renderer.render_prompt([*FIRST[1:], {"role": "assistant", "content": "7"}, *NEXT])


def test_observations_that_the_template_refuses_are_an_error(make_renderer: MakeRenderer) -> None:
    observation: list[Message] = [{"role": "tool", "content": "42"}]
    with pytest.raises(RenderingError, match="roles must alternate"):
        make_renderer("mistral").observation_delta([1], observation)


def test_template_kwargs_reach_every_path(make_renderer: MakeRenderer) -> None:
    empty_thought = "<think>\n\n</think>\n\n"
    qwen = make_renderer("qwen3", enable_thinking=False)
    assert qwen.tokenizer.decode(qwen.render_prompt(FIRST)).endswith(empty_thought)
    assert empty_thought not in qwen.tokenizer.decode(make_renderer("qwen3").render_prompt(FIRST))
    llama = make_renderer("llama3", date_string="1 May 2026")
    assert "Today: 1 May 2026" in llama.tokenizer.decode(llama.render_prompt(FIRST))
    assert "Today: 26 Jul 2024" in llama.tokenizer.decode(make_renderer("llama3").render_prompt(FIRST))


def test_template_kwargs_reach_the_delta(files: dict[str, bytes]) -> None:
    files["chat_template.jinja"] = (
        b"{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        b"{% if add_generation_prompt %}<|im_start|>assistant{{ mark }}: {% endif %}"
    )
    files["chat_template.jinja"] = files["chat_template.jinja"].replace(
        b"{{ m.role }}", b"{{ m.role }}{{ mark if m.role == 'assistant' }}"
    )
    tokenizer = ChatTokenizer.from_files(files)
    renderer = ConversationRenderer(tokenizer, tokenizer.encode("<|im_end|>"), {"mark": "!"})
    assert renderer.preserves_prefix
    assert tokenizer.decode(renderer.observation_delta(tokenizer.encode("7<|im_end|>"), NEXT)).endswith("assistant!: ")


def test_an_action_is_parsed_without_template_tokens(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("smollm2")
    encode = renderer.tokenizer.encode
    assert renderer.parse(encode("It is 7<|im_end|>")).text == "It is 7"
    assert not renderer.parse(encode("It is 7<|im_end|>")).truncated
    assert renderer.parse(encode("It is 7")).truncated
    assert not renderer.parse(encode("It is 7"), finished=True).truncated
    assert renderer.parse(encode("<|im_end|>")).text == ""
    assert renderer.parse(encode("7<|im_start|>8")).text == "78"


def test_reasoning_is_kept_apart_from_what_is_said(make_renderer: MakeRenderer) -> None:
    for family, opened in (("qwen3", "<think>\n"), ("thinks_first", "")):
        renderer = make_renderer(family)
        action = renderer.parse(renderer.tokenizer.encode(f"{opened}carry the one</think>12<|im_end|>"))
        assert (action.text, action.reasoning.strip()) == ("12", "carry the one")
        unfinished = renderer.parse(renderer.tokenizer.encode(f"{opened}carry the"))
        assert (unfinished.text, unfinished.truncated) == ("", True)


ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Sums.",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
    },
}
WITH_TOOLS = """{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_tools_reach_the_template_on_every_path(files: dict[str, bytes]) -> None:
    tokenizer = ChatTokenizer.from_files({**files, "chat_template.jinja": WITH_TOOLS.encode()})
    renderer = ConversationRenderer(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>") or 0])
    shown = tokenizer.decode(renderer.render_prompt(NEXT, [ADD]))
    assert shown.startswith("<|im_start|>system\n[{")
    assert '"add"' in shown
    action = tokenizer.encode("7<|im_end|>")
    assert renderer.observation_delta(action, NEXT, [ADD]) == renderer.observation_delta(action, NEXT)


def test_a_template_without_tools_gets_them_in_the_system_message(make_renderer: MakeRenderer) -> None:
    renderer = make_renderer("smollm2")
    shown = renderer.tokenizer.decode(renderer.render_prompt(FIRST, [ADD]))
    assert shown.startswith("<|im_start|>system\nBe brief.\n\nYou may call functions.")
    assert '{"type": "function", "function": {"name": "add"' in shown
    assert "You are SmolLM" not in renderer.tokenizer.decode(renderer.render_prompt(NEXT, [ADD]))
    action = renderer.tokenizer.encode("7<|im_end|>")
    whole = renderer.render_prompt([*FIRST, {"role": "assistant", "content": "7"}, *NEXT], [ADD])
    assert whole == renderer.render_prompt(FIRST, [ADD]) + action + renderer.observation_delta(action, NEXT, [ADD])
