"""How the commands of `opentinker env` are told which environment, and with which arguments."""

import ast
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from opentinker.errors import ConfigError

EnvironmentArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A built-in name, path/to/file.py (or file.py:Class), a folder that `env new` wrote, a server's URL, or "
        "ADAPTER:NAME.",
        show_default=False,
    ),
]
ArgsOption = Annotated[
    list[str] | None,
    typer.Option("--args", help="Constructor arguments: KEY=VALUE (may be repeated), or one JSON object.", show_default=False),
]


def environment_name(name: str) -> str:
    """A name as configs take it, of what a person types: a file stands for the one environment that it defines, a folder for
    the file of its name in it.

    Raises:
        ConfigError: the file defines no environment, or several.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (path / f"{path.resolve().name}.py").is_file():
        path = path / f"{path.resolve().name}.py"
    elif not name.endswith(".py"):
        return name
    try:
        classes = [node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return f"{path}:Environment"  # loading it says what is wrong
    found = [c.name for c in classes if any(ast.unparse(base).endswith("Environment") for base in c.bases)]
    if len(found) == 1:
        return f"{path}:{found[0]}"
    if not found:
        raise ConfigError(f"{path} defines no subclass of opentinker.Environment", hint=f"name the class: {path}:Class")
    raise ConfigError(f"{path} defines several environments", hint=f"choose one: {', '.join(f'{path}:{one}' for one in found)}")


def constructor_arguments(given: Sequence[str] | None) -> dict[str, Any]:
    """What `--args` says. Values are YAML, as in a config: numbers, booleans, lists, or texts.

    Raises:
        ConfigError: it is neither a JSON object nor KEY=VALUE.
    """
    args: dict[str, Any] = {}
    for text in given or ():
        try:
            args |= _parsed(text)
        except (ValueError, yaml.YAMLError) as error:
            raise ConfigError(
                f"--args {text}: {error}", hint="--args size=9 --args rule=free, or --args '{\"size\": 9}'"
            ) from None
    return args


def _parsed(text: str) -> dict[str, Any]:
    if text.lstrip().startswith("{"):
        value = json.loads(text)
        return dict(value)
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError("it is no KEY=VALUE")
    return {key: yaml.safe_load(value)}
