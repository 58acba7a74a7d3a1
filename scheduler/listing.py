"""Which jobs a list shows, and how it goes on."""

from typing import Annotated

from pydantic import Field

from opentinker.config.base import Config
from opentinker.scheduler.states import JobState

LIVE = tuple(state for state in JobState if not state.ended)
MAX_LIMIT = 500


class JobQuery(Config):
    """The filters of `GET /v1/jobs`; a job has to match all of them."""

    limit: Annotated[int, Field(ge=1, le=MAX_LIMIT)] = 50
    """Jobs in one page."""
    cursor: Annotated[str, Field(max_length=64)] | None = None
    """An earlier page's `next`. Jobs that were submitted meanwhile do not shift the pages."""
    state: list[JobState] = Field(default_factory=list)
    """Any of these; empty = any at all."""
    kind: Annotated[str, Field(max_length=32)] | None = None
    name: Annotated[str, Field(max_length=200)] | None = None
    """A part of the job's name, in upper or lower case."""
    owner: Annotated[str, Field(max_length=200)] | None = None
    """Whose jobs; None = the caller's own, '*' = everybody's. Others' only for administrators."""


FIRST_PAGE = JobQuery()
