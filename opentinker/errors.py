"""The one exception tree. Every error has a stable `code`, a human message and, where one helps, a `hint`."""

from typing import Any


class OpenTinkerError(Exception):
    """Base of everything that OpenTinker raises on purpose.

    `code` is stable and meant for programs; `status` is the HTTP status it travels with.
    """

    code = "error"
    status = 500

    def __init__(self, detail: str, *, hint: str = "") -> None:
        super().__init__(detail)
        self.detail = detail
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.detail} ({self.hint})" if self.hint else self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.detail, self.hint))

    def to_problem(self) -> dict[str, Any]:
        """The error as an RFC 9457 problem document."""
        return {
            "type": f"urn:opentinker:{self.code}",
            "title": type(self).__name__,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            "hint": self.hint,
        }


def _rebuild(cls: type[OpenTinkerError], detail: str, hint: str) -> OpenTinkerError:
    return cls(detail, hint=hint)


class ConfigError(OpenTinkerError):
    """A config, override or argument is wrong."""

    code = "invalid_config"
    status = 400


class InvalidRequestError(OpenTinkerError):
    """A request or its data break the protocol."""

    code = "invalid_request"
    status = 400


class AuthenticationError(OpenTinkerError):
    """No key, or a wrong one."""

    code = "unauthenticated"
    status = 401


class ForbiddenError(OpenTinkerError):
    """The key is valid, but its scopes do not allow this."""

    code = "forbidden"
    status = 403


class RateLimitedError(OpenTinkerError):
    """Too many attempts; the hint says when to try again."""

    code = "rate_limited"
    status = 429

    def __init__(self, detail: str, *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(detail, hint=hint)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild_limited, (self.detail, self.hint, self.retry_after_s))


def _rebuild_limited(detail: str, hint: str, retry_after_s: float) -> RateLimitedError:
    return RateLimitedError(detail, hint=hint, retry_after_s=retry_after_s)


class NotFoundError(OpenTinkerError):
    """The named thing does not exist (or is not yours)."""

    code = "not_found"
    status = 404


class ConflictError(OpenTinkerError):
    """The state of the thing does not allow this."""

    code = "conflict"
    status = 409


class UnknownModelError(ConfigError):
    """The base model is neither a known name nor a model directory."""

    code = "unknown_model"


class TooLargeError(InvalidRequestError):
    """A request or a part of it is larger than allowed."""

    code = "too_large"
    status = 413


class ContextOverflowError(InvalidRequestError):
    """Prompt and answer do not fit into the model's context."""

    code = "context_overflow"


class VersionNotServedError(ConflictError):
    """A sample was asked of a policy version that the engine does not serve."""

    code = "version_not_served"


class ImageMissingError(ConflictError):
    """A request names an image that the server does not hold (any more): upload it, and ask again."""

    code = "image_missing"


class SequenceGapError(ConflictError):
    """A command's predecessor did not arrive in time."""

    code = "sequence_gap"


class StorageError(OpenTinkerError):
    """The scheduler's store cannot be written; nothing of the request was accepted."""

    code = "storage"
    status = 507


class UnavailableError(OpenTinkerError):
    """The other side cannot be reached or answers with a transient failure."""

    code = "unavailable"
    status = 503


class DeadlineError(OpenTinkerError):
    """Something did not happen in time."""

    code = "deadline_exceeded"
    status = 504


class JobFailedError(OpenTinkerError):
    """The job ended in FAILED or CANCELLED; the detail carries the cause."""

    code = "job_failed"
    status = 409


class ServerLostError(JobFailedError):
    """The job's server died while the client was using it."""

    code = "server_lost"


class AgentLostError(OpenTinkerError):
    """Another process that drove an agent of this run is gone; the detail says which, and why."""

    code = "agent_lost"
    status = 409


class AgentStuckError(AgentLostError):
    """An update on one of this process's servers does not end while the others wait; on another server it may."""

    code = "agent_stuck"


class EnvironmentLoadError(ConfigError):
    """The environment class cannot be imported or is not an Environment."""

    code = "environment_load"


class EpisodesFailedError(OpenTinkerError):
    """Training cannot go on: episodes keep ending in errors."""

    code = "episodes_failed"


class EnvironmentFailedError(OpenTinkerError):
    """An environment's code raised, or answered with something malformed."""

    code = "environment_failed"


class ProtocolError(OpenTinkerError):
    """An order of play that cannot go on, or an action that breaks it: out of turn, twice, or of an agent that is not there."""

    code = "protocol_violated"
    status = 409


class RenderingError(OpenTinkerError):
    """A chat template cannot render these messages."""

    code = "rendering"
    status = 400


class EngineError(OpenTinkerError):
    """The rollout engine failed."""

    code = "engine"


class TrainerError(OpenTinkerError):
    """The trainer failed; the policy is as it was before the command."""

    code = "trainer"


class WeightSyncError(OpenTinkerError):
    """A publish was not acknowledged for every parameter, or engine and trainer drifted apart."""

    code = "weight_sync"


class CheckpointError(OpenTinkerError):
    """A checkpoint cannot be written or read; an earlier one of that name is intact."""

    code = "checkpoint"


def _tree(cls: type[OpenTinkerError]) -> dict[str, type[OpenTinkerError]]:
    found = {cls.code: cls}
    for child in cls.__subclasses__():
        if child.__module__ == __name__:  # Ray derives classes from ours, with our codes
            found |= _tree(child)
    return found


def from_problem(problem: dict[str, Any]) -> OpenTinkerError:
    """The exception that a problem document describes; an unknown code gives the base class."""
    cls = _tree(OpenTinkerError).get(str(problem.get("code")), OpenTinkerError)
    error = cls(str(problem.get("detail", "unknown error")), hint=str(problem.get("hint", "")))
    if cls is OpenTinkerError and "code" in problem:
        error.code = str(problem["code"])
    return error
