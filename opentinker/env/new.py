"""Writes a starting point for an environment: a folder with the environment, its test, a README and a job's config."""

import keyword
import re
from importlib import resources
from pathlib import Path
from typing import Literal, get_args

from opentinker.errors import ConfigError

Template = Literal["single", "multi", "dataset", "tools"]
TEMPLATES: tuple[Template, ...] = get_args(Template)
_DATA: dict[str, tuple[str, ...]] = {"dataset": ("train.jsonl", "held_out.jsonl")}
_TURNS = {"single": 1, "multi": 8, "dataset": 1, "tools": 6}
_ABOUT = re.compile(r'^class NewEnvironment\(.*?\):\n    """(.*?)"""', re.MULTILINE | re.DOTALL)


def write_environment(name: str, template: Template, parent: Path) -> list[Path]:
    """Write a template as the folder `name` in `parent`; the files, in the order in which to read them.

    Raises:
        ConfigError: `name` is none for a Python module, the folder is there already, or it cannot be written.
    """
    module = _module(name)
    folder = parent / module
    source = _template(f"{template}.py")
    about = _ABOUT.search(source)
    assert about is not None
    description = "\n".join(line.strip() for line in about[1].strip().splitlines())
    texts = {
        f"{module}.py": source,
        f"test_{module}.py": _template(f"tests_{template}.py"),
        f"{module}.yaml": _template("config.yaml").replace("MAX_TURNS", str(_TURNS[template])),
        "README.md": _template("README.md").replace("DESCRIPTION", description),
        **{file: _template(file) for file in _DATA.get(template, ())},
    }
    try:
        folder.mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(_renamed(text, template, module), encoding="utf-8")
    except FileExistsError:
        raise ConfigError(f"{folder} exists already", hint="choose another name, or move it away") from None
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error
    return [folder / file for file in texts]


def _module(name: str) -> str:
    module = name.replace("-", "_")
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise ConfigError(
            f"'{name}' is no name for an environment", hint="lower-case letters, digits and _, such as my_game; a letter first"
        )
    if module in ("opentinker", "test"):
        raise ConfigError(f"'{name}' would hide the package of that name", hint="choose another name")
    return module


def class_name(module: str) -> str:
    """The class in a module: my_game -> MyGame."""
    return "".join(part[:1].upper() + part[1:] for part in module.split("_"))


def _renamed(text: str, template: Template, module: str) -> str:
    # The module's own import is in a block of its own, as linters want it.
    text = text.replace(f"\nfrom opentinker.env.templates.{template} import", f"\n\nfrom {module} import")
    return text.replace("NewEnvironment", class_name(module)).replace("new_environment", module)


def _template(file: str) -> str:
    return resources.files("opentinker.env.templates").joinpath(file).read_text(encoding="utf-8")
