"""Messages to tokens, turn by turn: what was sampled is kept as it was sampled, and only what the template adds is rendered.

Every template goes through the same path. The turn's delta is rendered after a marker answer, which a probe has proved to be
what the template adds after any answer (`probe.py`); a template that changes earlier turns is refused, and the episode then
renders the whole conversation anew. Of the `renderers` library this uses the response parser (reasoning apart from content).
Its typed renderers could bridge some of the refused templates, but are chosen by hub name, while a server hands out only
tokenizer files; for the rest it renders by the template itself, as here.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from opentinker.client.messages import TokenChunk
from opentinker.env.environment import Action, Message, Tool
from opentinker.errors import RenderingError
from opentinker.rendering.chunks import NO_IMAGES, Images, Rendered, check_texts, expanded, shape_of, template_content
from opentinker.rendering.probe import Kind, TurnShape, delta_text, probe_turns
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.rendering.tools import with_described_tools

_THINK = "<think>"
_SHAPES_KEPT = 256
_HELLO: list[Message] = [{"role": "user", "content": "Hi"}]
_MARK = "Zmarkqz"
_PROBE: list[Message] = [{"role": "user", "content": _MARK}]
_TOOL: Tool = {"type": "function", "function": {"name": "Ztoolqz", "parameters": {"type": "object", "properties": {}}}}


class ConversationRenderer:
    """Renders conversations for one model. `template_kwargs` (such as enable_thinking) reach the template on every path;
    `image_placeholder` is what its chat template puts for an image, None if it takes none (the server's `info` says it)."""

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        stop_token_ids: Iterable[int],
        template_kwargs: Mapping[str, Any] | None = None,
        image_placeholder: str | None = None,
    ) -> None:
        from renderers.default import DefaultRenderer  # half a second: it loads an HTTP client of its own

        self.tokenizer = tokenizer
        self.stop_token_ids = tuple(dict.fromkeys(stop_token_ids))
        self._template_kwargs = dict(template_kwargs or {})
        self._parser = DefaultRenderer(tokenizer)
        self._placeholder = image_placeholder
        self._shapes: dict[tuple[tuple[Kind, ...], str], TurnShape] = {}
        # The templates of some vision-language models pass over a content that is no list of parts.
        self._parts_only = False
        self._parts_only = not self._shows(_PROBE) and self._shows_parts()
        opens_thinking = self._text(_HELLO, True).rstrip().endswith(_THINK)
        self._thinking_prefix = tokenizer.encode(_THINK) if opens_thinking else None
        self._shows_tools = self._tells_of_tools()
        try:
            self.prefix_break = self._shape((("user", ""),)).broken
            """How the template changes earlier turns when a user turn follows; empty if it preserves its prefix."""
        except RenderingError as error:
            self.prefix_break = str(error)

    @property
    def takes_images(self) -> bool:
        return self._placeholder is not None

    @property
    def preserves_prefix(self) -> bool:
        """Whether user turns can be appended to what was sampled."""
        return not self.prefix_break

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> Rendered:
        """Token ids of the whole conversation, with the tools that the policy may call, and the header of its next turn.

        A conversation with images gives chunks; `images` has what stands for each of them (`PolicyClient.upload` gives it).

        Raises:
            RenderingError: the template refuses the messages, or does not show each image once.
        """
        return self._tokens(self._text(messages, True, tools), messages, images)

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        """What was said, without template tokens and with reasoning apart.

        An action is truncated when it lacks a stop token, unless `finished` says that it ended otherwise (a stop string).
        """
        tokens = [int(t) for t in action_tokens]
        stopped = bool(tokens) and tokens[-1] in self.stop_token_ids
        parsed = self._parser.parse_response(tokens[:-1] if stopped else tokens, prompt_ids=self._thinking_prefix)
        return Action(parsed.content, truncated=not (stopped or finished), reasoning=parsed.reasoning_content or "")

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> Rendered:
        """Token ids that the template adds after a sampled action: the rest of its turn, the observation, the next header.

        An observation with images gives chunks, as in `render_prompt`.

        If the action ended with the turn's own stop token, only what follows it; an action that was cut is closed here.

        Raises:
            RenderingError: the template refuses the messages, or changes earlier turns.
        """
        shape = self._shape(tuple((m["role"], shape_of(m)) for m in observation), tools)
        if shape.broken:
            raise RenderingError(f"the chat template does not preserve its prefix: {shape.broken}")
        delta = self._tokens(delta_text(partial(self._text, tools=tools), observation), observation, images)
        last = int(action_tokens[-1]) if len(action_tokens) else None
        if last not in self.stop_token_ids or last not in shape.opening:
            return delta
        said = shape.opening.index(last) + 1
        if isinstance(delta, list):
            return delta[said:]
        first = delta[0]
        if not isinstance(first, TokenChunk) or len(first.tokens) < said:
            raise RenderingError("the chat template shows an image before it closes the policy's turn")
        return (TokenChunk(first.tokens[said:]), *delta[1:]) if len(first.tokens) > said else delta[1:]

    def _tokens(self, text: str, shown: Sequence[Message], images: Images) -> Rendered:
        if self._placeholder is not None:
            check_texts(shown, self._placeholder)
        return expanded(text, self.tokenizer.encode, self._placeholder, shown, images)

    def _shows(self, messages: Sequence[Message]) -> bool:
        """Whether the text of the probe is in what the template makes of it."""
        try:
            return _MARK in self._text(messages, True)
        except RenderingError:
            return False

    def _shows_parts(self) -> bool:
        parts = [{**message, "content": [{"type": "text", "text": _MARK}]} for message in _PROBE]
        try:
            return _MARK in self.tokenizer.render_text(parts, True, **self._template_kwargs)
        except RenderingError:
            return False

    def _shape(self, kinds: tuple[Kind, ...], tools: Sequence[Tool] = ()) -> TurnShape:
        key = (kinds, json.dumps(tools) if tools else "")
        if key not in self._shapes:
            if len(self._shapes) >= _SHAPES_KEPT:  # an environment may declare other tools in each episode
                self._shapes.pop(next(iter(self._shapes)))
            text = partial(self._text, tools=tools)
            self._shapes[key] = probe_turns(text, self.tokenizer.encode, kinds, self._placeholder or "")
        return self._shapes[key]

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = (), *, opened: bool = True) -> str:
        """The conversation as text, with the header of the policy's next turn if it is `opened`.

        Raises:
            RenderingError: the template refuses the messages.
        """
        return self._text(messages, opened, tools)

    def _tells_of_tools(self) -> bool:
        """Whether the template does anything with tools. One that refuses this one does; a job without tools never meets it."""
        hello = [template_content(message, self._parts_only) for message in _HELLO]
        try:
            with_tool = self.tokenizer.render_text(hello, True, [_TOOL], **self._template_kwargs)
        except RenderingError:
            return True
        return with_tool != self._text(_HELLO, True)

    def _text(self, messages: Sequence[Message], add_generation_prompt: bool, tools: Sequence[Tool] = ()) -> str:
        if tools and not self._shows_tools:
            messages, tools = with_described_tools(messages, tools), ()
        plain = [template_content(message, self._parts_only) for message in messages]
        return self.tokenizer.render_text(plain, add_generation_prompt, tools, **self._template_kwargs)
