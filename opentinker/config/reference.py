"""The reference page of all config keys, generated from the models, so that it cannot go stale."""

import re
from typing import Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from opentinker.config.base import models_of
from opentinker.config.job import KINDS

_HEAD = """# Configuration

Generated from the config models (`python -m opentinker.config.reference > docs/configuration.md`); a test keeps it current.
Every key can be given in YAML, as a dotted override (`opentinker submit job.yaml training.steps=10`) or in Python. Unknown
keys are errors. A section shows only what an earlier section does not.
"""


def _type_name(annotation: Any) -> str:
    if get_origin(annotation) is not None and hasattr(annotation, "__metadata__"):
        return _type_name(get_args(annotation)[0])
    if get_origin(annotation) is tuple:
        return f"tuple[{', '.join('...' if part is ... else _type_name(part) for part in get_args(annotation))}]"
    text = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    text = re.sub(r"\btyping\.|\bopentinker\.(\w+\.)+", "", text)
    return "".join(text.split("Annotated[")[-1].split(", FieldInfo")[:1])


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    return "`{}`" if field.default_factory is not None else f"`{field.default!r}`"


def _rows(model: type[BaseModel], prefix: str) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        children = models_of(field.annotation)
        if children and get_origin(field.annotation) is dict:
            # Below a name of the user's choice. Of its sections, those that the job has, too, are above.
            rows.append(f"| `{prefix}{name}` | by name | {_default(field)} | {_text(field)} |")
            above = _models_below(model, but=name)
            for child in children:
                for part, inner in child.model_fields.items():
                    rows.append(_row(f"{prefix}{name}.NAME.{part}", inner))
                    for section in models_of(inner.annotation):
                        if section not in above:
                            rows += _rows(section, f"{prefix}{name}.NAME.{part}.")
        elif children:
            optional = field.default is None
            if optional:
                rows.append(f"| `{prefix}{name}` | section | `None` | {_text(field)} |")
            for child in children:
                rows += _rows(child, f"{prefix}{name}.")
        else:
            rows.append(_row(f"{prefix}{name}", field))
    return rows


def _models_below(model: type[BaseModel], but: str = "") -> set[type[BaseModel]]:
    """Every model that a field of this one holds, at any depth, without the field `but`."""
    found: set[type[BaseModel]] = set()
    for name, field in model.model_fields.items():
        for child in models_of(field.annotation) if name != but else ():
            found |= {child, *_models_below(child)}
    return found


def _row(path: str, field: FieldInfo) -> str:
    kind = "section" if models_of(field.annotation) else _type_name(field.annotation).replace("|", "\\|")
    return f"| `{path}` | {kind} | {_default(field)} | {_text(field)} |"


def _text(field: FieldInfo) -> str:
    return " ".join((field.description or "").split()).replace("|", "\\|")


def _paragraph(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split()) + "\n"


def render() -> str:
    """The whole page, in Markdown."""
    parts = [_HEAD]
    for kind, model in KINDS.items():
        own = [row for row in _rows(model, "") if row not in parts]
        parts += [f"\n## `kind: {kind}`", _paragraph(model), "| key | type | default | meaning |", "|---|---|---|---|", *own]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(render(), end="")
