"""`opentinker models`: what a job's base_model can be."""

from typing import Any

from rich.console import RenderableType
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    out,
    plain_table,
    print_json,
)


def models(
    as_json: JsonOption = False, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """List the base models that jobs can name. --json prints one model per line."""
    with connected(url, key, state_dir) as client:
        found = client.models()
    if as_json:
        for model in found:
            print_json(model)
    else:
        out.print(models_view(found))


def models_view(found: list[dict[str, Any]]) -> RenderableType:
    """The table."""
    table = plain_table(
        ("name", {"min_width": max((len(model["name"]) for model in found), default=0)}),
        ("parameters", {"justify": "right"}),
        ("dtype", {}),
        ("type", {}),
        ("where", {"no_wrap": False, "overflow": "fold"}),
    )
    for model in found:
        table.add_row(
            Text(model["name"]),
            count(model["parameters"]),
            model["dtype"] or "-",
            model["model_type"] or "-",
            Text(model["path"] or model["source"]),
        )
    return table


def count(parameters: int | None) -> str:
    """A number of parameters, for people."""
    if parameters is None:
        return "-"
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g} {unit}"
    return str(parameters)
