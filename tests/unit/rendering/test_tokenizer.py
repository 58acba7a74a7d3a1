"""A tokenizer works from its files alone, and says what is wrong with them."""

import json
from collections.abc import Callable

import pytest

from opentinker.errors import RenderingError
from opentinker.rendering.tokenizer import ChatTokenizer

HELLO = [{"role": "user", "content": "hello"}]


def test_special_tokens_are_single_ids_and_text_survives_the_round_trip(files: dict[str, bytes]) -> None:
    tokenizer = ChatTokenizer.from_files(files)
    text = "<|im_start|>user\nnaïve → 7<|im_end|>\n"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|im_start|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nnaïve → 7\n"
    assert tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert tokenizer.convert_tokens_to_ids("no such token") is None


def test_the_template_may_live_in_the_config_alone_or_among_several(files: dict[str, bytes]) -> None:
    template = files.pop("chat_template.jinja").decode()
    for value in (template, [{"name": "tool_use", "template": "-"}, {"name": "default", "template": template}]):
        config = json.loads(files["tokenizer_config.json"]) | {"chat_template": value}
        tokenizer = ChatTokenizer.from_files(files | {"tokenizer_config.json": json.dumps(config).encode()})
        assert tokenizer.render_text(HELLO, True).endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.json": None}, "no tokenizer.json"),
        ({"tokenizer.json": b"{}"}, "cannot be read"),
        ({"chat_template.jinja": None}, "no chat template"),
        ({"chat_template.jinja": b"{% for %}"}, "chat template is not valid"),
    ],
)
def test_broken_files_are_named(files: dict[str, bytes], change: dict[str, bytes | None], message: str) -> None:
    changed = {name: data for name, data in {**files, **change}.items() if data is not None}
    with pytest.raises(RenderingError, match=message):
        ChatTokenizer.from_files(changed)


def test_messages_that_the_template_refuses_are_an_error_with_its_words(make_tokenizer: Callable[[str], ChatTokenizer]) -> None:
    with pytest.raises(RenderingError, match="roles must alternate"):
        make_tokenizer("mistral").render_text([{"role": "assistant", "content": "me first"}], True)


def test_a_template_cannot_reach_out_of_its_sandbox(files: dict[str, bytes]) -> None:
    files["chat_template.jinja"] = b"{{ ''.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RenderingError, match="unsafe"):
        ChatTokenizer.from_files(files).render_text(HELLO, True)


def test_hugging_face_conventions_hold_in_templates(files: dict[str, bytes]) -> None:
    files["chat_template.jinja"] = (
        b"{{ bos_token }}{{ {'k': '\xc3\xa9<'} | tojson }}{% for m in messages %}\n"
        b"{% if loop.index > 1 %}{% break %}{% endif %}\n"
        b"    {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    assert ChatTokenizer.from_files(files).render_text(HELLO * 2, True) == '<|bos|>{"k": "é<"}hello4'
