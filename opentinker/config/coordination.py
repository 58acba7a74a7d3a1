"""The config of where drivers meet whose agents play together."""

from typing import Annotated

from pydantic import Field

from opentinker.config.base import Config


class CoordinatorConfig(Config):
    """A run whose agents are driven by different processes, each with a job of its own: where they meet."""

    run: Annotated[str, Field(min_length=1, max_length=200)]
    """Its name, which all drivers give."""
    url: str = ""
    """The environment server that coordinates, such as http://10.0.0.7:8790; empty = `environment.name`, if that is one."""
    token_file: str = ""
    """A file with that server's token, as the driver sees it; empty = the variable OPENTINKER_ENV_TOKEN."""
