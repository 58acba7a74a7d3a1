"""A driver's end of a run that a coordinator hosts: joins, keeps the lease, and speaks and hears over HTTP."""

import asyncio
import contextlib
import logging
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import httpx

from opentinker.client.http import error_of
from opentinker.env.frames import pack, unpack
from opentinker.errors import AgentLostError, ConflictError, DeadlineError, OpenTinkerError, UnavailableError, from_problem
from opentinker.multiagent.coordination.channel import Channel, Words
from opentinker.multiagent.coordination.run import Round, SeatKind
from opentinker.multiagent.coordination.words import Answer
from opentinker.multiagent.phases import Moment, Phase

JOIN_S = 90.0
"""A coordinator may wait for a lease to end before it answers."""
ANSWER_S = 30.0
LISTEN_S = 20.0
UNREACHABLE_S = 30.0
"""So long a coordinator that does not answer is tried again."""
LEAVE_S = 5.0
FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
BEATS = 5
"""Signs of life within a lease."""
PATH = "/coordinator"
log = logging.getLogger(__name__)


class Member:
    """One driver in one run. Not for several event loops."""

    def __init__(
        self,
        url: str,
        token: str,
        run: str,
        agents: Mapping[str, SeatKind],
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """With a `transport` everything goes through it, and no thread keeps the lease."""
        self.run = run
        self.agents = dict(agents)
        self.gone: dict[str, str] = {}
        """Agents without which the run goes on, and why."""
        self._url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._driver = secrets.token_hex(16)
        self._http = httpx.AsyncClient(base_url=self._url, headers=self._headers, timeout=ANSWER_S, transport=transport)
        self._beats = transport is None
        self._channel = Channel()
        self._to_say = asyncio.Event()
        self._changed = asyncio.Event()
        self._failed: OpenTinkerError | None = None
        self._over = False
        """There is nothing more to say or to hear."""
        self._start: int | None = None
        self._moment: Moment | None = None
        self._words: asyncio.Queue[Any] | None = None
        """Of the games that are played now."""
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = threading.Event()
        self._left = False

    async def join(self, terms: Mapping[str, Any], steps: Sequence[int]) -> None:
        """Take the seats. `terms` is what all drivers must agree on, `steps` after which ones this driver could go on.

        Raises:
            ConflictError: a seat is taken, or the drivers do not agree; the detail names both values.
            UnavailableError: the coordinator does not answer.
            OpenTinkerError: what it reports.
        """
        asked = {"driver": self._driver, "run": self.run, "agents": self.agents, "terms": dict(terms), "steps": list(steps)}
        answer = await self._patiently("/join", asked, JOIN_S)
        lease_s = float(answer["lease_s"])
        self._tasks = [asyncio.ensure_future(self._listen(lease_s)), asyncio.ensure_future(self._speak())]
        if self._beats:
            threading.Thread(target=self._beat, args=(lease_s / BEATS,), name=f"lease-{self.run}", daemon=True).start()

    async def started(self) -> int:
        """Wait until all have joined: the step after which the run goes on.

        Raises:
            ConflictError: there is no step from which all can go on.
            DeadlineError: a seat stayed empty.
            OpenTinkerError: why the run has ended.
        """
        await self._until(lambda: self._start is not None)
        assert self._start is not None
        self._moment = self._moment or Moment(self._start, Phase.ROLLOUT)
        return self._start

    async def finish(self, moment: Moment) -> None:
        """This driver has done its part of a phase; returns when all have.

        Raises:
            AgentLostError: another driver is lost, or held up the others for too long; the detail says which, and why.
            OpenTinkerError: why the run has ended.
        """
        self._say(["finish", moment.iteration, moment.phase.value])
        await self._until(lambda: self._moment is not None and self._moment > moment)

    @contextlib.asynccontextmanager
    async def games(self, asked: Round, tasks: Sequence[Any]) -> AsyncIterator["asyncio.Queue[Any]"]:
        """Ask for games; what is said of them, until `round_over`. An OpenTinkerError among it is the run's end."""
        if self._words is not None:
            raise ConflictError("a driver plays one round of games at a time")
        if self._left:
            raise ConflictError(f"this driver has left run '{self.run}'", hint="its training is over")
        self._raise_if_over()
        self._words = asyncio.Queue()
        try:
            self._say(["open", asked.kind, asked.step, asked.first_index, asked.group_size, list(tasks)])
            yield self._words
        finally:
            self._words = None

    def answer(self, game: str, agent: str, turn: int, answer: Answer) -> None:
        """Answer to a turn."""
        self._say(["answer", game, agent, turn, answer.to_wire()])

    async def leave(self, cause: BaseException | None = None, *, stopped: str = "") -> None:
        """Say goodbye, and why, if it is no end in order; `stopped` is why the training here has stopped before its end. Never
        raises; what is not heard in time is left to the lease."""
        if self._left:
            return
        self._left = True
        self._closed.set()
        if self._failed is None and self._tasks:
            self._say(["stop", stopped] if stopped else ["leave", None if cause is None else _as_error(cause).to_problem()])
            try:
                async with asyncio.timeout(LEAVE_S):
                    while self._channel.waiting and self._failed is None:
                        await self._changed_once()
            except TimeoutError:
                log.warning("run=%s: the coordinator did not hear that this driver leaves; its lease will end", self.run)
        self._over = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    def _say(self, word: list[Any]) -> None:
        self._channel.say(pack(word, "what a driver says"))
        self._to_say.set()

    async def _listen(self, lease_s: float) -> None:
        """Hear what there is; each request waits for news, and is a sign of life."""
        wait_s = min(LISTEN_S, lease_s / BEATS)
        try:
            while not self._over:
                await self._exchange(wait_s)
        finally:
            self._closed.set()  # nobody hears any more, so there is nobody whose life a thread could be a sign of

    async def _speak(self) -> None:
        """Say what there is to say, without waiting for news."""
        while not self._over:
            await self._to_say.wait()
            self._to_say.clear()
            while self._channel.waiting and not self._over:
                await self._exchange(0.0)

    async def _exchange(self, wait_s: float) -> None:
        heard, first, words = self._channel.message()
        try:
            body = {"driver": self._driver, "heard": heard, "first": first, "words": words, "wait_s": wait_s}
            answer = await self._patiently("/talk", body, UNREACHABLE_S)
            for word in self._channel.take(Words(answer["heard"], answer["first"], answer["words"])):
                self._hear(unpack(word))
        except OpenTinkerError as error:
            self._fail(error)
        except Exception as error:
            log.exception("run=%s: the coordinator's answer cannot be read", self.run)
            self._fail(UnavailableError(f"the coordinator {self._url} says what nobody understands: {error!r}"))
        self._change()

    def _hear(self, word: Any) -> None:
        match word:
            case ["start", step]:
                self._start = step
            case ["moment", iteration, phase]:
                self._moment = Moment(iteration, Phase(phase))
            case ["gone", agents, cause]:
                log.warning("run=%s goes on without %s: %s", self.run, ", ".join(agents), cause)
                self.gone |= dict.fromkeys(agents, cause)
                if set(agents) & set(self.agents):
                    self._fail(AgentLostError(f"run '{self.run}' goes on without this driver: {cause}"))
            case ["failed", problem]:
                self._fail(from_problem(problem))
            case _ if self._words is not None:
                self._words.put_nowait(word)

    def _fail(self, error: OpenTinkerError) -> None:
        if self._failed is None:
            self._failed, self._over, self._beats = error, True, False
            self._to_say.set()
            if self._words is not None:
                self._words.put_nowait(error)

    def _raise_if_over(self) -> None:
        if self._failed is not None:
            raise type(self._failed)(self._failed.detail, hint=self._failed.hint) from self._failed

    async def _until(self, ready: Callable[[], bool]) -> None:
        while not ready():
            self._raise_if_over()
            await self._changed_once()

    async def _changed_once(self) -> None:
        await self._changed.wait()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _patiently(self, path: str, body: Mapping[str, Any], limit_s: float) -> Any:
        """The answer. Requests that got none are sent again: saying a thing twice changes nothing.

        Raises:
            UnavailableError: there was no answer for so long.
            OpenTinkerError: what the coordinator reports.
        """
        content, ends, pause_s = pack(body, "what a driver says"), time.monotonic() + limit_s, FIRST_PAUSE_S
        while True:
            try:
                response = await self._http.post(PATH + path, content=content, timeout=max(ANSWER_S, limit_s))
                if response.is_success:
                    return unpack(response.content)
                error = error_of(response, self._url)
                if response.status_code not in (429, 502, 503, 504):
                    raise error
            except httpx.TransportError as cause:
                error = UnavailableError(
                    f"the coordinator {self._url} cannot be reached: {cause!r}", hint="is `opentinker env serve` running there?"
                )
            if time.monotonic() + pause_s > ends:
                raise error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)

    def _beat(self, every_s: float) -> None:
        """Signs of life while nobody drives the event loop, or it is busy."""
        body = pack({"driver": self._driver})
        with httpx.Client(headers=self._headers, timeout=max(every_s, 1.0)) as http:
            while not self._closed.wait(every_s) and self._beats:
                try:
                    response = http.post(f"{self._url}{PATH}/alive", content=body)
                except httpx.HTTPError as error:
                    log.warning("run=%s: no sign of life got through: %r", self.run, error)
                    continue
                if response.status_code == 404:  # the event loop hears of it, too
                    return
            if self._beats and not self._left:  # the event loop was closed, by a program that has done what it wanted
                self._channel.say(pack(["leave", None]))
                message = self._channel.message()._asdict() | {"driver": self._driver}
                with contextlib.suppress(httpx.HTTPError):  # then the lease ends
                    http.post(f"{self._url}{PATH}/talk", content=pack(message))


@contextlib.asynccontextmanager
async def leaving(member: Member | None) -> AsyncIterator[None]:
    """Whatever goes wrong within is what the other drivers are told when this one leaves."""
    try:
        yield
    except BaseException as error:
        if member is not None:
            await member.leave(error)
        raise


def _as_error(cause: BaseException) -> OpenTinkerError:
    if isinstance(cause, OpenTinkerError):
        return cause
    if isinstance(cause, asyncio.CancelledError | KeyboardInterrupt):
        return AgentLostError(str(cause.args[0]) if cause.args else "it was interrupted")
    if isinstance(cause, TimeoutError):
        return DeadlineError(str(cause) or "it took too long")
    return AgentLostError(f"{type(cause).__name__}: {cause}"[:2000])
