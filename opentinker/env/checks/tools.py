"""Are declared tools function schemas that a chat template and a model can use?"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}


def tool_problems(tools: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with tools, in words that name the tool and the place."""
    names = [tool["function"]["name"] for tool in tools]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"two tools are called '{name}'"
    for tool in tools:
        function = tool["function"]
        name = function["name"]
        if not _NAME.fullmatch(name):
            yield f"'{name}' is no name for a tool: letters, digits and _ - . only, 64 at most"
        if not function.get("description"):
            yield f"'{name}' has no description; the policy knows nothing else about it"
        parameters = function.get("parameters", {})
        if parameters and parameters.get("type") != "object":
            yield f"'{name}': parameters must be a schema of type 'object'"
        else:
            yield from _schema_problems(parameters, f"'{name}'")
        try:
            json.dumps(dict(tool), allow_nan=False)
        except (TypeError, ValueError) as error:
            yield f"'{name}' cannot be written as JSON: {error}"


def _schema_problems(schema: Any, place: str) -> Iterator[str]:
    if not isinstance(schema, Mapping):
        yield f"{place}: a schema must be a dict, not {type(schema).__name__}"
        return
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if kind is not None and not all(isinstance(one, str) and one in _TYPES for one in kinds):
        yield f"{place}: {kind!r} is no type; there are {', '.join(sorted(_TYPES))}"
    if "enum" in schema and not (isinstance(schema["enum"], list | tuple) and schema["enum"]):
        yield f"{place}: enum must be a list with something in it"
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        yield f"{place}: properties must be a dict of schemas"
        return
    required = schema.get("required", [])
    if not isinstance(required, list | tuple):
        yield f"{place}: required must be a list of names"
    else:
        for missing in [name for name in required if name not in properties]:
            yield f"{place}: {missing!r} is required, and not among the properties"
    for name, sub in properties.items():
        yield from _schema_problems(sub, f"{place}, {name}")
    if "items" in schema:
        yield from _schema_problems(schema["items"], f"{place}, items")
