"""A model's tokenizer and chat template, from the files that its server hands out: no model hub, no transformers."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Self

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from opentinker.env.environment import Message, Tool
from opentinker.errors import RenderingError

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class ChatTokenizer:
    """Text to tokens and back, and messages to text by the model's own chat template.

    It has as much of transformers' tokenizer interface as the `renderers` library asks for.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: str, config: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        named = {name: _content(config[name]) for name in _NAMED_TOKENS if config.get(name)}
        self.eos_token: str | None = named.get("eos_token")
        self.unk_token_id = self.convert_tokens_to_ids(named["unk_token"]) if "unk_token" in named else None
        self.eos_token_id = self.convert_tokens_to_ids(self.eos_token) if self.eos_token else None
        special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
        self.all_special_tokens = sorted({*special, *named.values()})
        try:
            self._template = _jinja().from_string(chat_template, globals=dict(named))
        except TemplateError as error:
            raise RenderingError(f"the model's chat template is not valid: {error}") from error

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> Self:
        """From `tokenizer.json`, `tokenizer_config.json` and, where the model has one apart, `chat_template.jinja`.

        Raises:
            RenderingError: a file is missing or broken, or the model has no chat template.
        """
        try:
            tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
            config = json.loads(files.get("tokenizer_config.json", b"{}"))
        except KeyError:
            raise RenderingError("the model has no tokenizer.json") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise RenderingError(f"the model's tokenizer files cannot be read: {error}") from error
        template = files["chat_template.jinja"].decode() if "chat_template.jinja" in files else config.get("chat_template")
        if isinstance(template, list):  # some models name several
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if not template:
            raise RenderingError("the model has no chat template", hint="use an instruction-tuned model")
        return cls(tokenizer, template, config)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a text. Special tokens that the text spells out become single ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, token: str) -> int | None:
        """The id of one token; None (or the unknown token's id, when there is one) if it is not in the vocabulary."""
        index: int | None = self._tokenizer.token_to_id(token)
        return index if index is not None else getattr(self, "unk_token_id", None)

    def render_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Tool] = (),
        **template_kwargs: Any,
    ) -> str:
        """What the chat template makes of the messages and tools.

        Raises:
            RenderingError: the template refuses them.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=list(tools) or None,
                documents=None,
                **template_kwargs,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
            raise RenderingError(f"the chat template refuses these messages: {error}") from error

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **template_kwargs: Any,
    ) -> list[int] | str:
        """As transformers' method of that name, without its dict form."""
        if return_dict:
            raise RenderingError("apply_chat_template gives token ids or text, not a dict")
        text = self.render_text(messages, add_generation_prompt, **template_kwargs)
        return self.encode(text) if tokenize else text


def _content(token: str | Mapping[str, Any]) -> str:
    """Old files write a special token as an object."""
    return token if isinstance(token, str) else str(token["content"])


class _GenerationBlocks(Extension):
    """`{% generation %}` marks assistant text in some templates; it renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration is an instance-level set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _jinja() -> ImmutableSandboxedEnvironment:
    """The template environment that chat templates are written for (Hugging Face's conventions)."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlocks]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda fmt: datetime.now().strftime(fmt)
    return environment
