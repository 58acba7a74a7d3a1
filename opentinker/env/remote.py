"""Environments that run on a server (`opentinker env serve`), used as if they were here."""

import asyncio
import os
import random
import time
from collections.abc import Awaitable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import SplitResult, urlsplit

import httpx

from opentinker.client.http import error_of as http_error
from opentinker.env import remote_stream
from opentinker.env.deadline import left_s
from opentinker.env.environment import Action, Environment, StepResult, Tool
from opentinker.env.frames import CLOSE, DONE, ERROR, FINALIZE, RESET, STEP, error_of, pack, unpack
from opentinker.env.remote_stream import JOB_VARIABLE, Link, StreamLostError, link_to
from opentinker.env.ring import Ring
from opentinker.env.secret_files import REMOTE_VARIABLE, no_token, read_token
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    EnvironmentFailedError,
    OpenTinkerError,
    RateLimitedError,
    TooLargeError,
    UnavailableError,
)

TOKEN_VARIABLE = REMOTE_VARIABLE
CALL_S = 300.0
"""Deadline of a call that has no other."""
LOST_S = 20.0
"""How long a server that does not answer is tried again before its sessions are given up."""
TASKS_S = 60.0
CHECKED_TASKS = 500
"""So many tasks of a file, or as many as its server takes at once, are shown to a hosted class before any episode."""
AHEAD = 0.2
"""A server is given less than the deadline by this part of it, and by this many seconds at most, so that its word on what was
late arrives in time."""
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class _Servers:
    """Addresses and token of the servers that host one class."""

    def __init__(self, urls: Sequence[str], token: str | None, token_file: str | Path | None) -> None:
        self.ring = Ring([_checked_url(url) for url in urls])
        if not self.ring.urls:
            raise ConfigError("a remote environment needs the address of a server", hint="such as http://127.0.0.1:8790")
        self._token = token
        self._token_file = token_file
        self._info: dict[str, Any] | None = None

    def token(self) -> str:
        """The token that was given, or that of the file, or that of the variable, or none."""
        return read_token(self._token_file, TOKEN_VARIABLE) if self._token is None else self._token

    def with_file(self, token_file: str | Path | None) -> "_Servers":
        """The same servers, with the token of a file."""
        return self if token_file is None else _servers(self.ring.urls, None, str(token_file))

    def link(self, url: str) -> Link:
        return link_to(url, self.token())

    def info(self) -> dict[str, Any]:
        """What the first server that answers says of its class; blocks."""
        if self._info is None:
            self._info = dict(self._http("GET", "/info", None))
        return self._info

    def tasks(self, split: str, args: Mapping[str, Any], method: str, numbers: Sequence[int], tasks: Sequence[Any] = ()) -> Any:
        """Ask for tasks, or something about the given ones; blocks."""
        body = {"split": split, "args": dict(args), "method": method, "numbers": list(numbers)}
        return self._http("POST", "/tasks", {**body, "tasks": list(tasks)} if tasks else body)["result"]

    def _http(self, method: str, path: str, body: Any) -> Any:
        """The answer of a server; as with sessions, servers that do not answer are tried again for a while."""
        ends = time.monotonic() + min(LOST_S, left_s(CALL_S))
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                return self._http_once(method, path, body)
            except UnavailableError:
                wait_s = pause_s * random.uniform(0.5, 1.0)
                if time.monotonic() + wait_s > ends:
                    raise
            time.sleep(wait_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _http_once(self, method: str, path: str, body: Any) -> Any:
        limit_s = max(0.001, left_s(TASKS_S))
        # httpx refuses an empty token, and the server's own word on a missing one says what to do.
        headers = {"Authorization": f"Bearer {token}"} if (token := self.token()) else {}
        if job := os.environ.get(JOB_VARIABLE):
            headers["X-OpenTinker-Job"] = job
        error: OpenTinkerError | None = None
        for url in self.ring.order(b"", time.monotonic()):
            try:
                response = httpx.request(method, url + path, json=body, headers=headers, timeout=limit_s)
            except httpx.TimeoutException:
                error = DeadlineError(f"the environment server {url} did not answer within {limit_s:.3g} s")
            except httpx.HTTPError as cause:
                self.ring.failed(url, time.monotonic())
                error = UnavailableError(
                    f"cannot reach the environment server {url}: {cause}", hint="is `opentinker env serve` running there?"
                )
            else:
                if response.is_success:
                    self.ring.answered(url)
                    return response.json()
                error = http_error(response, url)
                if not isinstance(error, UnavailableError):
                    break
        assert error is not None, "there is a server at least"
        raise error


@lru_cache(maxsize=64)
def _servers(urls: tuple[str, ...], token: str | None, token_file: str | None) -> _Servers:
    """Those who name the same servers share what is known of them."""
    return _Servers(urls, token, token_file)


class _Remote:
    """A class attribute that the server has: asked for when it is first read."""

    def __init__(self, name: str, default: Any) -> None:
        self._name = name
        self._default = default

    def __get__(self, instance: Any, owner: type["RemoteEnvironment"]) -> Any:
        servers = owner.servers
        return self._default if servers is None else tuple(servers.info().get(self._name, self._default))


class _SampleActions:
    """`sample_actions(task)` of the hosted class; there is no such attribute if it has none."""

    def __get__(self, instance: Any, owner: type["RemoteEnvironment"]) -> Any:
        servers = owner.servers
        try:
            known = servers is not None and servers.info().get("sample_actions")
        except AuthenticationError as error:  # the token may be in a file that only the arguments name
            raise AttributeError(f"sample_actions cannot be asked for: {error}") from error
        if servers is None or not known:
            raise AttributeError("the hosted class has no sample_actions")
        return lambda task: servers.tasks("train", {}, "sample_actions", [], [task])


class RemoteTaskSource(TaskSource):
    """The tasks of a hosted environment."""

    def __init__(self, servers: _Servers, split: str, args: Mapping[str, Any]) -> None:
        self._servers = servers
        self._split = split
        self._args = dict(args)

    @property
    def size(self) -> int | None:  # type: ignore[override]
        found: int | None = self._servers.tasks(self._split, self._args, "size", [])
        return found

    def draw(self, seed: int, start: int, count: int) -> list[Any]:
        """
        Raises:
            OpenTinkerError: what the server reports; UnavailableError when none answers.
        """
        drawn: list[Any] = self._servers.tasks(self._split, self._args, "draw", [seed, start, count])
        return drawn

    def first(self, limit: int) -> list[Any]:
        """
        Raises:
            OpenTinkerError: what the server reports; UnavailableError when none answers.
        """
        found: list[Any] = self._servers.tasks(self._split, self._args, "first", [limit])
        return found


class RemoteEnvironment(Environment):
    """One session on a server. `args` are the constructor's arguments of the class that is hosted there.

    The token comes from `token`, from the file `token_file`, or from the variable OPENTINKER_ENV_TOKEN. `remote_environment`
    makes a class of it for which the addresses are settled.
    """

    servers: ClassVar[_Servers | None] = None
    host_args: ClassVar[tuple[str, ...]] = ("token", "token_file")
    task_columns = _Remote("task_columns", ())
    sample_actions = _SampleActions()

    def __init__(
        self,
        urls: str | Sequence[str] = (),
        /,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        **args: Any,
    ) -> None:
        given = type(self).servers
        if given is None:
            named = _split(urls)
            self._servers = _servers(tuple(named), token, str(token_file) if token_file is not None else None)
        elif token is not None:
            raise no_token("environment.args", TOKEN_VARIABLE)
        else:
            self._servers = given.with_file(token_file)
        self._args = args
        self._id = os.urandom(16)
        self._link: Link | None = None
        self._used = False
        self._index = 0
        self._finalizes = True
        self.tools: Sequence[Tool] = ()

    @classmethod
    def make_task(cls, seed: int) -> Any:
        assert cls.servers is not None, "use the class that remote_environment gives"
        return cls.servers.tasks("train", {}, "make_task", [seed])

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        assert cls.servers is not None, "use the class that remote_environment gives"
        found: Sequence[Any] = cls.servers.tasks("held_out", {}, "held_out_tasks", [100_000])
        return found

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        return RemoteTaskSource(cls._asked_with(args), split, _constructor(args))

    @classmethod
    def required_columns(cls, args: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(cls._asked_with(args).info().get("task_columns", ()))

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        """
        Raises:
            OpenTinkerError: what the server reports, of the first tasks; UnavailableError when none answers.
        """
        servers = cls._asked_with(args)
        if not servers.info().get("checks_tasks"):
            return
        few = tasks.first(CHECKED_TASKS)
        while True:
            try:
                servers.tasks("train", _constructor(args), "check_tasks", [], few)
                return
            except TooLargeError:  # for the limit that this server has
                if len(few) <= 1:
                    raise
                few = few[: max(1, len(few) // 4)]

    @classmethod
    def _asked_with(cls, args: Mapping[str, Any]) -> _Servers:
        assert cls.servers is not None, "use the class that remote_environment gives"
        return cls.servers.with_file(args.get("token_file"))

    async def reset(self, task: Any) -> list[Any]:
        """
        Raises:
            EnvironmentFailedError: the environment failed, or no server can be reached.
            DeadlineError: it took too long, or all servers were full.
        """
        if self._used:
            raise EnvironmentFailedError("this environment was reset before", hint="an environment is used once")
        self._used = True
        timeout_s = _left_s()
        body = await self._translated(self._placed(self._body([self._args, task], "the task"), timeout_s))
        messages, self.tools, self._finalizes = unpack(body)
        found: list[Any] = messages
        return found

    async def step(self, action: Action) -> StepResult:
        """
        Raises:
            EnvironmentFailedError: the environment failed, or the session was lost.
            DeadlineError: it took too long.
        """
        body = self._body([action.text, action.truncated, action.reasoning], "the action")
        kind, answer = await self._asked(STEP, self._index, body)
        self._index += 1
        reward, components, messages, metrics = unpack(answer)
        return StepResult(reward, kind == DONE, messages, metrics, components)

    async def finalize(self) -> Any:
        """
        Raises:
            EnvironmentFailedError: the environment failed, or the session was lost.
            DeadlineError: it took too long.
        """
        if not self._finalizes:
            return None
        _, answer = await self._asked(FINALIZE, 0, b"")
        reward, components = unpack(answer)
        return components or reward

    async def close(self) -> None:  # type: ignore[override]
        """
        Raises:
            EnvironmentFailedError: the environment failed over it.
        """
        link, self._link = self._link, None
        if link is None:
            return
        try:
            await self._translated(self._answer(link, CLOSE, 0, b"", _left_s()))
        except EnvironmentFailedError as error:
            if not isinstance(error.__cause__, UnavailableError):
                raise  # a server that is gone has nothing left to close
        finally:
            link.leave()

    async def _asked(self, op: int, index: int, body: bytes) -> tuple[int, bytes]:
        if self._link is None:
            raise EnvironmentFailedError("this environment was not reset, or is closed")
        answer: tuple[int, bytes] = await self._translated(self._answer(self._link, op, index, body, _left_s()))
        return answer

    async def _answer(self, link: Link, op: int, index: int, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        """The server's answer. A request whose connection broke is sent again: the server knows it by session and index."""
        asked_s = timeout_s - min(AHEAD, AHEAD * timeout_s)
        try:
            kind, answer = await link.request(op, self._id, index, asked_s, body)
        except (StreamLostError, UnavailableError):
            kind, answer = await self._answer_again(link, op, index, body, timeout_s)
        if kind == ERROR:
            raise error_of(answer)
        return kind, answer

    async def _answer_again(self, link: Link, op: int, index: int, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        ends = time.monotonic() + min(LOST_S, timeout_s)
        pause_s = FIRST_PAUSE_S
        while True:
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            try:
                return await link.request(op, self._id, index, timeout_s, body)
            except (StreamLostError, UnavailableError) as error:
                if time.monotonic() > ends:
                    detail = error.detail if isinstance(error, UnavailableError) else "its connection broke"
                    raise UnavailableError(
                        f"the environment server {link.url} is gone, and the session with it: {detail}"
                    ) from error

    async def _placed(self, body: bytes, timeout_s: float) -> bytes:
        """Reset on the first server that takes the session; the answer's body."""
        ring = self._servers.ring
        began = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while True:
            full: RateLimitedError | None = None
            error: OpenTinkerError = UnavailableError("no environment server can be reached")
            for url in ring.order(self._id, time.monotonic()):
                left = timeout_s - (time.monotonic() - began)
                # Whoever gives up while this runs finds the link in `close`, so that the server learns of it.
                link = self._link = self._servers.link(url)
                link.enter()
                try:
                    _, answer = await self._once(link, body, left)
                except OpenTinkerError as refused:
                    self._link = None
                    link.leave()
                    if isinstance(refused, UnavailableError):
                        ring.failed(url, time.monotonic())
                        error = refused
                    elif isinstance(refused, RateLimitedError):
                        full = refused
                    else:
                        raise
                else:
                    ring.answered(url)
                    return answer
            wait_s = pause_s if full is None else full.retry_after_s
            spent = time.monotonic() - began
            if spent + wait_s > timeout_s:
                if full is not None:
                    raise DeadlineError(f"no session was free within {timeout_s:.3g} s: {full.detail}", hint=full.hint)
                raise error
            if full is None and spent > LOST_S:
                raise error
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    async def _once(self, link: Link, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        asked_s = timeout_s - min(AHEAD, AHEAD * timeout_s)
        try:
            kind, answer = await link.request(RESET, self._id, 0, asked_s, body)
        except StreamLostError:
            kind, answer = await self._lost_reset(link, asked_s, body)
        if kind == ERROR:
            raise error_of(answer)
        return kind, answer

    async def _lost_reset(self, link: Link, timeout_s: float, body: bytes) -> tuple[int, bytes]:
        try:
            return await link.request(RESET, self._id, 0, timeout_s, body)
        except StreamLostError:
            raise UnavailableError(f"the environment server {link.url} breaks its connections") from None

    async def _translated(self, work: Awaitable[Any]) -> Any:
        """An environment fails in two ways only: EnvironmentFailedError and DeadlineError."""
        try:
            return await work
        except (EnvironmentFailedError, DeadlineError):
            raise
        except OpenTinkerError as error:
            raise EnvironmentFailedError(error.detail, hint=error.hint) from error

    def _body(self, value: Any, what: str) -> bytes:
        try:
            body = pack(value, what)
            remote_stream.check_size(body)
        except OpenTinkerError as error:
            raise EnvironmentFailedError(error.detail, hint=error.hint) from error
        return body


def _constructor(args: Mapping[str, Any]) -> dict[str, Any]:
    """Of the configured arguments those that go to the hosted class."""
    return {name: value for name, value in args.items() if name != "token_file"}


def _left_s() -> float:
    return max(0.001, left_s(CALL_S))


def remote_environment(
    urls: str | Sequence[str], *, token: str | None = None, token_file: str | Path | None = None
) -> type[RemoteEnvironment]:
    """A class whose instances are sessions on these servers (a URL, several with commas, or a list).

    Nothing is asked of a server yet. Without a token here the variable OPENTINKER_ENV_TOKEN has it when it is needed.

    Raises:
        ConfigError: an address is none.
    """
    servers = _servers(tuple(_split(urls)), token, str(token_file) if token_file is not None else None)
    return type("RemoteEnvironment", (RemoteEnvironment,), {"servers": servers, "__module__": __name__})


def _split(urls: str | Sequence[str]) -> list[str]:
    given = urls.split(",") if isinstance(urls, str) else urls
    return [url.strip() for url in given if url.strip()]


def _more(parts: SplitResult) -> dict[str, bool]:
    return {"user or password": "@" in parts.netloc, "query": bool(parts.query), "fragment": bool(parts.fragment)}


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
        more = [part for part, given in _more(parts).items() if given]
    except ValueError:
        usable, more = False, []
    if more:  # the address itself is not repeated: it may hold a password
        raise ConfigError(
            f"an environment server's address has no {' and no '.join(more)}",
            hint=f"such as http://127.0.0.1:8790; the token goes into the variable {TOKEN_VARIABLE}, or a token_file",
        )
    if not usable:
        raise ConfigError(f"'{url}' is not an environment server's address", hint="such as http://127.0.0.1:8790")
    return url.rstrip("/")
