"""How another process finds an environment's class: by what `load_environment` takes, or by module and name."""

from typing import Any

from opentinker.env.environment import Environment
from opentinker.env.load import name_of
from opentinker.errors import ConfigError


def reference_of(environment: type[Environment]) -> dict[str, Any]:
    """What `load_reference` in another process makes the class of.

    Raises:
        ConfigError: it was defined in a notebook, a script or a function, where no other process can load it.
    """
    if (known := name_of(environment)) is not None:
        return {"name": known[0], "base_dir": str(known[1])}
    module, qualname = environment.__module__, environment.__qualname__
    name = environment.__name__
    hint = f"put {name} into a file of its own and name it path/to/file.py:{name}, or set execution = 'thread'"
    if module == "__main__":
        raise ConfigError(
            f"{name} is defined in the program itself (a notebook or script), so that no process of its own can load it",
            hint=hint,
        )
    if "<locals>" in qualname:
        raise ConfigError(f"{name} is defined inside a function, so that no process of its own can load it", hint=hint)
    return {"module": module, "qualname": qualname}
