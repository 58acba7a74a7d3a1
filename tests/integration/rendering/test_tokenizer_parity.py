"""The client's tokenizer and transformers' give the same tokens for the same files."""

from pathlib import Path

import pytest

from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer

CONVERSATION = [
    {"role": "system", "content": "Be brief. Ünïcode → ok"},
    {"role": "user", "content": "What is 3 + 4?\n\n  indented"},
    {"role": "assistant", "content": "The answer is 7."},
    {"role": "user", "content": "higher"},
]


@pytest.mark.parametrize("first", [0, 1])
def test_messages_become_the_tokens_that_transformers_makes_of_them(tiny_model_dir: Path, first: int) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(tiny_model_dir)
    files = {p.name: p.read_bytes() for p in tiny_model_dir.iterdir() if p.suffix in (".json", ".jinja")}
    tokenizer = ChatTokenizer.from_files(files)
    renderer = ConversationRenderer(tokenizer, [reference.eos_token_id])
    expected = reference.apply_chat_template(CONVERSATION[first:], add_generation_prompt=True, return_dict=False)
    assert renderer.render_prompt(CONVERSATION[first:]) == expected  # type: ignore[arg-type]
    assert tokenizer.eos_token_id == reference.eos_token_id
    assert set(tokenizer.all_special_tokens) == set(reference.all_special_tokens)
    assert tokenizer.decode(expected) == reference.decode(expected)


def test_appended_turns_are_the_full_renderings_tokens(tiny_model_dir: Path) -> None:
    files = {p.name: p.read_bytes() for p in tiny_model_dir.iterdir() if p.suffix in (".json", ".jinja")}
    tokenizer = ChatTokenizer.from_files(files)
    assert tokenizer.eos_token_id is not None
    renderer = ConversationRenderer(tokenizer, [tokenizer.eos_token_id])
    assert renderer.preserves_prefix
    action = [*tokenizer.encode("The answer is 7."), tokenizer.eos_token_id]
    appended = renderer.render_prompt(CONVERSATION[:2]) + action  # type: ignore[arg-type]
    appended += renderer.observation_delta(action, CONVERSATION[3:])  # type: ignore[arg-type]
    assert appended == renderer.render_prompt(CONVERSATION)  # type: ignore[arg-type]
