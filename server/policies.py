"""Which policies a server's front knows: whose token opens which, and who created it. Pure: no I/O and no clock."""

import hashlib
import hmac
import re
import secrets
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from opentinker.errors import AuthenticationError, ConflictError, InvalidRequestError, NotFoundError
from opentinker.policy_tokens import further_token

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""Of a policy; it is also the name of a folder."""
CHANGES = frozenset({"forward_backward", "optim_step", "train_step", "load"})
"""Commands after which a policy may be another one than it began as, or than the weights that it was last given."""


@dataclass(frozen=True)
class _Known:
    digest: bytes
    """Of its token."""
    root: str
    """The token of the job's own policy that it was created beside, or its own."""
    creator: str = ""
    """The policy whose token created it; empty for the job's own."""
    request: bytes = b""
    """The digest of the request that created it."""


@dataclass(frozen=True)
class Admitted:
    """A further policy that may now be created, or is being created."""

    policy: str
    token: str
    is_new: bool


class PolicyTable:
    """The policies of one front. Those that it is made with are the job's own, and stay."""

    def __init__(self, tokens: Mapping[str, str], taken: Collection[str] = ()) -> None:
        """`taken` are names of policies that the job's other servers begin with, whose checkpoints are kept under them."""
        self._taken = frozenset(taken)
        self._known = {policy: _Known(_digest(token), token) for policy, token in tokens.items()}
        self._changed: set[str] = set()
        self._lives: Counter[str] = Counter()
        """How many policies of this name have gone."""

    def caller(self, token: str) -> str:
        """The policy that the token opens. All are compared, so time tells nothing.

        Raises:
            AuthenticationError: it opens none.
        """
        given = _digest(token)
        callers = [policy for policy, known in self._known.items() if hmac.compare_digest(given, known.digest)]
        if not callers:
            raise AuthenticationError("no valid token", hint="send 'Authorization: Bearer <policy token>'")
        return callers[0]

    def admit(self, caller: str, policy: str | None, request: bytes) -> Admitted:
        """Take in a policy that `caller` creates, under a name of the server's choice if it gives none. The same request again
        finds the same policy.

        Raises:
            InvalidRequestError: the name cannot be one.
            ConflictError: there is a policy of this name, which another request created or a server of the job began with.
        """
        if policy is None:
            policy = f"policy-{secrets.token_hex(4)}"
        if not NAME.fullmatch(policy):
            raise InvalidRequestError(
                f"{policy[:80]!r} cannot be a policy's name",
                hint="up to 64 letters, digits, '.', '_' and '-', no sign first",
            )
        if policy in self._taken:
            raise ConflictError(
                f"'{policy}' is the policy that one of the job's servers began with",
                hint="give it another name: the checkpoints of both would be in one folder",
            )
        root = self._known[caller].root
        token = further_token(root, self.key(policy))
        known = self._known.get(policy)
        if known is None:
            self._known[policy] = _Known(_digest(token), root, caller, request)
        elif (known.creator, known.request) != (caller, request):
            raise ConflictError(f"there already is a policy '{policy}' on this server", hint="give it another name")
        return Admitted(policy, token, known is None)

    def check_delete(self, caller: str, policy: str) -> None:
        """Whether `caller` may delete the policy: as the one that created it, or as the job's own.

        Raises:
            NotFoundError: there is no such policy for this caller.
            ConflictError: it is the job's own.
        """
        known = self._known.get(policy)
        if known is not None and not known.creator and caller == policy:
            raise ConflictError(
                f"policy '{policy}' is the job's own", hint="its command 'delete' frees its weights; the job's end, its server"
            )
        if known is None or not known.creator or (caller != known.creator and self._known[caller].creator):
            raise NotFoundError(f"no policy '{policy}' that this token may delete")

    def remove(self, policy: str) -> None:
        """Forget a further policy; its token opens nothing any more."""
        if policy in self._known:
            del self._known[policy]
            self._changed.discard(policy)
            self._lives[policy] += 1

    def note(self, policy: str, command: str) -> None:
        """The policy is given a command."""
        if command in CHANGES:
            self._changed.add(policy)

    def key(self, policy: str, *, gone: bool = False) -> str:
        """A name that no other policy of this server has had; with `gone`, that of the last one of this name that is gone."""
        lives = self._lives[policy] - gone
        return policy if lives < 1 else f"{policy}~{lives}"

    @property
    def further_to_save(self) -> list[str]:
        """The policies that are not the job's own and may hold what is in no checkpoint yet. One that was never trained has the
        weights that it was given: a frozen agent, or a past version that plays."""
        return [policy for policy, known in self._known.items() if known.creator and policy in self._changed]


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
