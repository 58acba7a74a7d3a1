"""What a policy wrote, as tool calls and answers. Every text gives a result, in time linear in its length; none raises.

`renderers` parses tool calls too, but from token ids of one known model; an environment has a text, of any model.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

MAX_CALLS = 32
"""Blocks of one action that are read; hostile text could hold a hundred thousand."""
_MAX_DIGITS = 1000
"""Python converts integers in quadratic time, and refuses more than 4,300 digits."""
_SHOWN = 80
"""Characters of the policy's own text that an error repeats."""
EXAMPLE = '<tool_call>{"name": "TOOL", "arguments": {"NAME": VALUE}}</tool_call>'

_OPENER = re.compile(r"<tool_call>|<function=|^[ \t]*```([^\s`]*)[^\n`]*$", re.MULTILINE)
_FENCE_END = re.compile(r"^[ \t]*```[ \t]*$", re.MULTILINE)
_FENCE = re.compile(r"^[ \t]*```([^\s`]*)[^\n`]*$", re.MULTILINE)
_CALL_FENCES = frozenset({"json", "tool_call", "tool_calls", "tool"})
_OPEN_FENCES = frozenset({"", "xml", "html", "text"})
"""Fences around whatever: calls inside them count. In a fence of code nothing is a call."""
_SPACE = re.compile(r"\s*")


@dataclass(frozen=True)
class ToolCall:
    """One call that a policy asked for."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedCalls:
    """The calls of an action, in order, and what is wrong with the malformed ones, said so that the policy can read it."""

    calls: list[ToolCall] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


class _MalformedError(Exception):
    """Says what is wrong with one call."""


def tool_calls(text: str, tools: Sequence[Mapping[str, Any]] = ()) -> ParsedCalls:
    """The tool calls in `text`, in any of the forms that chat models write. It never raises.

    Read are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen; `parameters` is accepted for `arguments`,
    a list for several calls), `<function=name><parameter=key>value</parameter></function>` with or without `<tool_call>` around
    it (Qwen3-Coder), and a fenced block of JSON that has a name and arguments. With `tools` (OpenAI function schemas) names and
    arguments are checked, and the values of the XML form get their declared types; without, one that is JSON is read as JSON.
    """
    found = ParsedCalls()
    schemas = {str(f["name"]): f for f in (t.get("function", t) for t in tools) if isinstance(f, Mapping) and "name" in f}
    for number, block in enumerate(_blocks(text), 1):
        if number > MAX_CALLS:
            found.errors.append(f"only the first {MAX_CALLS} tool calls of a message are read")
            break
        try:
            found.calls.extend(_checked(call, schemas) for call in _calls_of(block, schemas))
        except _MalformedError as error:
            found.errors.append(f"Tool call {number} is malformed: {error}")
    return found


@dataclass(frozen=True)
class _Block:
    """One call's text. `value` is its JSON, where it was read already; `closed` says that its end was there."""

    body: str
    form: str
    closed: bool = True
    value: Any = None


def _blocks(text: str) -> Iterator[_Block]:
    at, fences = 0, True
    while (opener := _OPENER.search(text, at)) is not None:
        at = opener.end()
        if opener.group() == "<tool_call>":
            start = _skip_space(text, at)
            block, at = _tagged_json(text, start) if text[start : start + 1] in ("{", "[") else _until(text, at, "</tool_call>")
            yield block
        elif opener.group() == "<function=":
            block, at = _until(text, opener.start(), "</function>")
            yield _Block(block.body, "xml", block.closed)
        else:
            language = opener.group(1).lower()
            around = language in _OPEN_FENCES or text.startswith("<tool_call>", _skip_space(text, at))
            if around or not fences:
                continue
            end = _FENCE_END.search(text, at)
            fences = end is not None  # looking for one that is not there, each time, would be quadratic
            if end is not None:
                body, at = text[at : end.start()], end.end()
                if language in _CALL_FENCES and (language != "json" or _looks_like_a_call(body)):
                    yield _Block(body, "json")


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _tagged_json(text: str, start: int) -> tuple[_Block, int]:
    """JSON ends where its own syntax says: a string in it may hold `</tool_call>`."""
    try:
        value, end = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return _until(text, start, "</tool_call>")
    after = _skip_space(text, end)
    if text.startswith("</tool_call>", after):
        return _Block(text[start:end], "json", True, value), after + len("</tool_call>")
    if after == len(text):  # some engines stop before the closing tag
        return _Block(text[start:end], "json", True, value), after
    return _until(text, start, "</tool_call>")


def _until(text: str, start: int, closing: str) -> tuple[_Block, int]:
    end = text.find(closing, start)
    stop = len(text) if end < 0 else end
    body = text[start:stop]
    form = "xml" if body.lstrip()[:10] == "<function=" else "json"
    if form == "xml" and closing == "</tool_call>" and end < 0:  # the inner tag closes it, too
        end = body.rfind("</function>")
    return _Block(body, form, end >= 0), stop + len(closing)


def _looks_like_a_call(body: str) -> bool:
    return '"name"' in body and ('"arguments"' in body or '"parameters"' in body)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:20]} is too large")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(strict=False, parse_float=_finite, parse_constant=_no_constant)
"""Not strict: models write code into JSON strings with its line ends as they are."""


def _json(body: str) -> Any:
    try:
        value = _DECODER.decode(body)
        if "\\u" in body:  # half of a surrogate pair could not be written to any file or wire
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        near = body[max(0, error.pos - _SHOWN // 2) : error.pos + _SHOWN // 2]
        raise _MalformedError(
            f"it is not JSON: {error.msg} at character {error.pos}, near {near!r}. Write {EXAMPLE}"
        ) from error
    except UnicodeEncodeError as error:
        raise _MalformedError("it holds half of a Unicode surrogate pair") from error
    except RecursionError as error:
        raise _MalformedError("it is nested too deeply") from error
    except ValueError as error:
        raise _MalformedError(f"it is not JSON: {str(error)[:_SHOWN]}") from error


def _calls_of(block: _Block, schemas: Mapping[str, Any]) -> list[ToolCall]:
    if not block.closed:
        tag = "</tool_call>" if block.form == "json" else "</function>"
        raise _MalformedError(f"it is not closed by {tag}")
    if block.form == "xml":
        return [_xml_call(block.body, schemas)]
    value = block.value if block.value is not None and "\\u" not in block.body else _json(block.body)
    several = value if isinstance(value, list) else [value]
    if len(several) > MAX_CALLS:
        raise _MalformedError(f"it is a list of {len(several)} calls; at most {MAX_CALLS} are read")
    return [_json_call(v) for v in several]


def _json_call(value: Any) -> ToolCall:
    if not isinstance(value, dict):
        raise _MalformedError(f"it must be a JSON object with 'name' and 'arguments'. Write {EXAMPLE}")
    inner = value.get("function")
    value = inner if isinstance(inner, dict) and "name" not in value else value
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _MalformedError(f"it has no 'name'. Write {EXAMPLE}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # as in OpenAI's API
        arguments = _json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise _MalformedError(f"'arguments' must be a JSON object. Write {EXAMPLE}")
    return ToolCall(name, arguments)


def _xml_call(body: str, schemas: Mapping[str, Any]) -> ToolCall:
    start = body.index("<function=") + len("<function=")
    end = body.find(">", start)
    name = body[start:end].strip() if end >= 0 else ""
    if not name or len(name) > 200:
        raise _MalformedError("it has no name. Write <function=TOOL><parameter=NAME>VALUE</parameter></function>")
    stop = body.rfind("</function>")
    at, stop = end + 1, len(body) if stop < 0 else stop
    raw: dict[str, str] = {}
    while (at := body.find("<parameter=", at, stop)) >= 0:
        key_end = body.find(">", at, stop)
        value_end = body.find("</parameter>", key_end, stop) if key_end >= 0 else -1
        if value_end < 0:
            raise _MalformedError(f"{body[at : at + _SHOWN]!r} is not closed by </parameter>")
        key = body[at + len("<parameter=") : key_end].strip()
        raw[key] = body[key_end + 1 : value_end].removeprefix("\n").removesuffix("\n")
        at = value_end
    types = _properties(schemas.get(name))
    return ToolCall(name, {key: _typed(value, types.get(key)) for key, value in raw.items()})


def _properties(schema: Any) -> Mapping[str, Any]:
    parameters = schema.get("parameters") if isinstance(schema, Mapping) else None
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _typed(value: str, schema: Any) -> Any:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return value
    try:
        return _json(value)
    except _MalformedError:
        return value


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


def _checked(call: ToolCall, schemas: Mapping[str, Any]) -> ToolCall:
    if not schemas:
        return call
    schema = schemas.get(call.name)
    if schema is None:
        raise _MalformedError(f"there is no tool {call.name[:_SHOWN]!r}; there is {', '.join(sorted(schemas))}")
    properties, parameters = _properties(schema), schema.get("parameters") or {}
    for name in parameters.get("required", ()):
        if name not in call.arguments:
            raise _MalformedError(f"{call.name} needs the argument '{name}'")
    for name, value in call.arguments.items():
        if name not in properties:
            known = ", ".join(properties) or "none"
            raise _MalformedError(f"{call.name} has no argument {name[:_SHOWN]!r}; its arguments: {known}")
        wanted = properties[name].get("type") if isinstance(properties[name], Mapping) else None
        types = _PYTHON_TYPES.get(wanted) if isinstance(wanted, str) else None
        if types and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise _MalformedError(f"{call.name}'s argument '{name}' must be of type {wanted}, not {type(value).__name__}")
    return call


_ALIASES = {"py": "python", "python3": "python", "sh": "bash", "shell": "bash"}


def fenced_code(text: str, language: str = "") -> list[str]:
    """The contents of the closed ``` blocks in `language` (any case, usual short names), in order; '' takes those of all."""
    return [text[start:end] for start, end, _, _ in _fences(text, language)]


def outside_code(text: str, language: str = "") -> str:
    """`text` without its closed ``` blocks in `language`, as `fenced_code` finds them."""
    kept, at = [], 0
    for _, _, begin, after in _fences(text, language):
        kept.append(text[at:begin])
        at = after
    return "".join([*kept, text[at:]])


def _fences(text: str, language: str) -> Iterator[tuple[int, int, int, int]]:
    """Where the content of a block and the whole of it start and end."""
    wanted, at = _ALIASES.get(language.lower(), language.lower()), 0
    while (opener := _FENCE.search(text, at)) is not None:
        end = _FENCE_END.search(text, opener.end())
        if end is None:
            return
        named = opener.group(1).lower()
        if not wanted or _ALIASES.get(named, named) == wanted:
            start = min(opener.end() + 1, len(text))
            yield start, max(start, end.start()), opener.start(), end.end()
        at = end.end()


_BOX_TOKEN = re.compile(r"(\\f?boxed\s*\{|\\fbox\s*\{)|\\.|[{}]", re.DOTALL)


def boxed(text: str) -> str | None:
    r"""The content of the last complete `\boxed{...}`, whose braces may nest; None where there is none."""
    opened: list[tuple[int, int]] = []
    best = (-1, 0)
    for token in _BOX_TOKEN.finditer(text):
        if token.group(1):
            opened.append((token.end(), token.end()))
        elif token.group() == "{":
            opened.append((-1, 0))
        elif token.group() == "}" and opened:
            start, _ = opened.pop()
            if start > best[0]:
                best = (start, token.start())
    return text[best[0] : best[1]].strip() if best[0] >= 0 else None


def tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last `<tag>...</tag>`; None where there is none."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    start = text.rfind(opening, 0, max(0, text.rfind(closing)))
    if start < 0:
        return None
    return text[start + len(opening) : text.index(closing, start)].strip()


_FRAC = re.compile(r"([-+−])?\s?\\[dt]?frac\s?\{\s?([-+−]?[0-9]{1,1000})\s?\}\s?\{\s?([-+−]?[0-9]{1,1000})\s?\}")
_RUN = re.compile(r"[.]?[0-9][0-9,.]*(?:[eE][-+]?[0-9]{1,3}(?![0-9a-zA-Z]))?")
_LAST_RUN = re.compile(r"(?<![0-9,.])[.]?[0-9][0-9,.]*\Z")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?\Z")


def last_number(text: str) -> Fraction | None:
    r"""The last number in `text`, exactly: `-1,234.50`, `3/4`, `\frac{3}{4}`, `.5`, `1e3`; None where there is none.

    A minus sign counts where it does not stand between two terms; a number of more than 1,000 digits is none.
    """
    run = frac = None
    for run in _RUN.finditer(text):  # noqa: B007 - the last match is the point
        pass
    if run is None:
        return None
    for frac in _FRAC.finditer(text):  # noqa: B007
        pass
    if frac is not None and frac.end() > run.start():
        over, under = (_signed_int(frac.group(i)) for i in (2, 3))
        value = Fraction(over, under) if under else None
        return -value if value is not None and frac.group(1) in ("-", "−") else value
    value, start = _decimal(run.group()), run.start()
    before = text[max(0, start - _MAX_DIGITS) : start].rstrip(" ")
    if value and before.endswith("/"):
        number = _LAST_RUN.search(before[:-1].rstrip(" "))
        over_value = _decimal(number.group()) if number else None
        if number is not None and over_value is not None:
            value, start = over_value / value, max(0, run.start() - _MAX_DIGITS) + number.start()
    return -value if value and _negative(text, start) else value


def _negative(text: str, start: int) -> bool:
    before = text[max(0, start - 2) : start]
    if not before or before[-1] not in "-−":
        return False
    return not (len(before) == 2 and (before[0].isalnum() or before[0] in ")]}"))


def _signed_int(digits: str) -> int:
    return int(digits.replace("−", "-"))


def _decimal(run: str) -> Fraction | None:
    run = run.rstrip(",.")
    if len(run) > _MAX_DIGITS:
        return None
    plain = run.replace(",", "") if _GROUPED.match(run) else run.rsplit(",", 1)[-1]
    try:
        return Fraction(plain)
    except ValueError:  # 1.2.3
        return Fraction(plain.rsplit(".", 1)[-1])
