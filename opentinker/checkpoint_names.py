"""Names of checkpoints within a job: those of its own policy, and behind `policy/` those of a further one."""

import re

from opentinker.checkpoints import NAME
from opentinker.errors import InvalidRequestError

_POLICY = re.compile(NAME)


def split_policy(text: str) -> tuple[str | None, str]:
    """(policy, the rest) of `policy/name@version` or `policy/tag`; the policy is None where it is the job's own.

    Raises:
        InvalidRequestError: what stands before the slash is no policy's name.
    """
    policy, slash, name = text.partition("/")
    if not slash:
        return None, text
    if _POLICY.fullmatch(policy) is None:
        raise InvalidRequestError(
            f"'{policy[:100]}' is not a policy's name", hint="POLICY/NAME@VERSION, such as critic/final@7"
        )
    return policy, name


def joined_policy(policy: str | None, name: str) -> str:
    """What `split_policy` takes apart."""
    return name if policy is None else f"{policy}/{name}"
