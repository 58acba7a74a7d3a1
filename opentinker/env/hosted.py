"""Sessions inside a worker process: what each may do next, and the record by which a repeated request is answered only."""

import inspect
import threading
from collections.abc import Awaitable, Callable, Mapping
from itertools import islice
from typing import Any, cast

from opentinker.env.coroutines import Coroutines
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.execution import checked_step, checked_tools, messages_of, reported
from opentinker.env.frames import (
    CLOSE,
    DONE,
    ERROR,
    FINALIZE,
    MAX_ANSWER_BYTES,
    NAMES,
    NO_SESSION,
    OK,
    RESET,
    RETIRE,
    STEP,
    TASKS,
    Frame,
    encode,
    pack,
    problem_body,
    unpack,
)
from opentinker.env.leader import Call, Executor
from opentinker.env.tasks import ListTasks, TaskSource
from opentinker.errors import (
    ConfigError,
    ConflictError,
    DeadlineError,
    EnvironmentFailedError,
    InvalidRequestError,
    NotFoundError,
    OpenTinkerError,
)
from opentinker.multiagent.seats import described

Outcome = tuple[int, bytes]
"""The kind of an answer and its body."""
Convert = Callable[[Any], Outcome]
_METHODS = {
    "make_task": 1,
    "held_out_tasks": 1,
    "draw": 3,
    "first": 1,
    "size": 0,
    "check_tasks": 0,
    "sample_actions": 0,
}
"""What can be asked about tasks, and how many numbers go with it."""
_ABOUT_TASKS = ("check_tasks", "sample_actions")
MAX_ACTIONS = 10_000
_HOW_TO_ASK = "draw [seed, start, count], first [limit], size []"
_DONE = "the episode is done"


class Session:
    """One environment. `current` is the call that runs, `record` the answer to the last one."""

    __slots__ = ("asked", "closed", "current", "environment", "expected", "failure", "over", "record", "waiting")

    def __init__(self) -> None:
        self.environment: Environment | None = None
        self.expected = 0
        """Index of the next step."""
        self.current: tuple[int, int] | None = None
        self.record: tuple[int, int, int, bytes] | None = None
        self.waiting: list[int] = []
        self.over = ""
        """Why there is no next step."""
        self.failure = ""
        self.closed = False
        self.asked = 0
        """Tells a repeated reset from another one."""


class Host:
    """The environments of one class in this process. `given` are the constructor's arguments that whoever hosts has set, None
    where those who ask are the same as those who host."""

    def __init__(self, environment: type[Environment], executor: Executor, given: Mapping[str, Any] | None = None) -> None:
        self._class = environment
        self._given = given
        self._reserved = frozenset(name for base in environment.__mro__ for name in vars(base).get("host_args", ()))
        self._executor = executor
        self._sessions: dict[bytes, Session] = {}
        self._sources: dict[bytes, TaskSource] = {}
        self._sources_lock = threading.Lock()
        self._coroutines = Coroutines(executor)
        self.finalizes = environment.finalize is not Environment.finalize

    def info(self) -> dict[str, Any]:
        """What a client may know of the class."""
        return {
            "name": self._class.__name__,
            "description": inspect.cleandoc(self._class.__doc__ or "").partition("\n")[0],
            "execution": self._class.execution,
            "task_columns": list(self._class.task_columns),
            "tools": list(self._class.tools) if isinstance(self._class.tools, list | tuple) else [],
            "finalizes": self.finalizes,
            "checks_tasks": _overrides_check(self._class),
            "sample_actions": callable(getattr(self._class, "sample_actions", None)),
            **described(self._class),
        }

    def begin(self, frame: Frame) -> Call | None:
        """The user code that a request asks for, or None when it was answered at once. Called under the executor's lock."""
        try:
            if frame.op == STEP or frame.op == FINALIZE:
                return self._next(frame)
            if frame.op == RESET:
                return self._reset(frame)
            if frame.op == CLOSE:
                return self._close(frame)
            if frame.op == TASKS:
                return self._tasks(frame)
            raise InvalidRequestError(f"there is no operation {frame.op}")
        except OpenTinkerError as error:
            self._executor.emit(_answer(frame, ERROR, problem_body(error)))
        except Exception as error:  # whatever it is, the thread that leads must go on
            problem = EnvironmentFailedError(f"the worker failed over a request: {type(error).__name__}: {error}")
            self._executor.emit(_answer(frame, ERROR, problem_body(problem)))
        return None

    def retire(self) -> bytes:
        """The wish to be replaced."""
        return encode(RETIRE, OK, 0, 0, NO_SESSION, 0.0, b"")

    def _reset(self, frame: Frame) -> Call | None:
        session = self._sessions.get(frame.session)
        asked = hash(frame.body)
        if session is not None:
            if session.asked == asked and self._repeated(session, frame):
                return None
            raise ConflictError("this session was reset before", hint="an environment is used once: take a new session")
        match unpack(frame.body):
            case [dict() as args, task]:
                pass
            case _:
                raise InvalidRequestError("a reset needs the constructor's arguments, a dict, and the task")
        args = self._arguments(args)
        session = self._sessions[frame.session] = Session()
        session.asked = asked
        name = self._class.__name__

        def converted(observation: Any) -> Outcome:
            environment = cast(Environment, session.environment)
            tools = checked_tools(environment.tools, name)
            return OK, _packed([messages_of(observation, f"{name}.reset"), tools, self.finalizes], f"{name}.reset")

        def run(call: Call) -> Outcome | None:
            with reported("the environment's constructor", self._class):
                environment = self._class(**args)
            with self._executor.lock:
                session.environment, closed = environment, session.closed
            if closed:
                environment.close()
                raise ConflictError("the session was closed while its environment was constructed")
            return self._invoke(call, environment.reset, f"{name}.reset", converted, task)

        return self._call(session, frame, run, f"{name}.reset")

    def _next(self, frame: Frame) -> Call | None:
        session = self._sessions.get(frame.session)
        if session is None:
            raise NotFoundError("there is no such session", hint="it was closed, or its worker was lost")
        if self._repeated(session, frame):
            return None
        op = NAMES[frame.op]
        if session.current is not None:
            raise ConflictError(f"{op}: the session's {NAMES[session.current[0]]} is still running")
        if session.failure:
            raise ConflictError(f"{op}: the session failed before: {session.failure}")
        if session.over and not (frame.op == FINALIZE and session.over == _DONE):
            raise ConflictError(f"{op}: {session.over}", hint="an environment is used once: reset a new session")
        environment, name = session.environment, type(session.environment).__name__
        assert environment is not None, "a session without failure that runs nothing was reset"
        what = f"{name}.{op}"
        if frame.op == FINALIZE:
            return self._call(
                session,
                frame,
                lambda call: self._invoke(call, environment.finalize, what, lambda reward: _finalized(reward, what)),
                what,
            )
        if frame.turn != session.expected:
            raise ConflictError(
                f"step {frame.turn} came where step {session.expected} is next",
                hint="only the last step can be repeated; steps are counted from 0",
            )
        match unpack(frame.body):
            case [str() as text, bool() as truncated, str() as reasoning]:
                action = Action(text, truncated, reasoning)
            case _:
                raise InvalidRequestError("an action must be a text", hint="send Action.text, a string")
        return self._call(
            session,
            frame,
            lambda call: self._invoke(call, environment.step, what, lambda result: _stepped(result, what), action),
            what,
        )

    def _close(self, frame: Frame) -> Call | None:
        session = self._sessions.pop(frame.session, None)
        if session is not None:
            session.closed = True
        if session is None or session.environment is None:
            self._executor.emit(_answer(frame, OK, b""))
            return None
        environment, session.environment = session.environment, None
        what = f"{type(environment).__name__}.close"
        last = Session()
        return self._call(last, frame, lambda call: self._invoke(call, environment.close, what, lambda _: (OK, b"")), what)

    def _tasks(self, frame: Frame) -> Call:
        match unpack(frame.body):
            case ["train" | "held_out" as split, dict() as args, str() as method, list() as numbers, *rest]:
                given = rest[0] if rest else []
            case _:
                raise InvalidRequestError("tasks are asked for with a split ('train', 'held_out'), arguments and a method")
        if not all(isinstance(number, int) for number in numbers):
            raise InvalidRequestError("seeds, places and counts must be integers")
        if len(numbers) != _METHODS.get(method):
            raise InvalidRequestError(f"there is no method '{method}' with {len(numbers)} numbers", hint=_HOW_TO_ASK)
        if not isinstance(given, list):
            raise InvalidRequestError("the tasks to look at must be a list")
        if method == "sample_actions" and (len(given) != 1 or not hasattr(self._class, "sample_actions")):
            raise InvalidRequestError("sample_actions takes one task, and a class that has this method")
        args = self._arguments(args)
        what = f"{self._class.__name__}.{method if method in _ABOUT_TASKS else 'task_source'}"

        def run(call: Call) -> Outcome:
            wrong: ConfigError | None = None
            result: Any = None
            with self._sources_lock, reported(what, self._class.task_source):
                try:
                    result = self._asked(split, args, method, numbers, given)
                except ConfigError as error:  # written for whoever configures the job: it stays what it is
                    wrong = error
            if wrong is not None:
                raise wrong
            return OK, _packed(result, what)

        return self._call(Session(), frame, run, what)

    def _asked(self, split: Any, args: Mapping[str, Any], method: str, numbers: list[int], given: list[Any]) -> Any:
        if method == "check_tasks":
            self._class.check_tasks(ListTasks(given, shuffle=False), args)
            return None
        if method == "sample_actions":
            suggest: Callable[[Any], Any] = getattr(self._class, "sample_actions")  # noqa: B009 - only some classes have it
            return list(islice(suggest(given[0]), MAX_ACTIONS))
        if method == "make_task":
            return self._class.make_task(*numbers)
        if method == "held_out_tasks":
            return list(islice(self._class.held_out_tasks(), *numbers))
        key = pack([split, args])
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = self._class.task_source(split, args)
        if method == "size":
            return source.size
        return source.draw(*numbers) if method == "draw" else source.first(*numbers)

    def _arguments(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What the constructor gets when a client asks for these arguments."""
        if self._given is None:
            return dict(asked)
        refused = sorted(str(name) for name in asked if name in self._reserved or "*" in self._reserved)
        if refused:
            raise InvalidRequestError(
                f"only whoever hosts {self._class.__name__} may set {', '.join(refused)}",
                hint=f"leave it out of environment.args; on the server: opentinker env serve ... --args {refused[0]}=VALUE",
            )
        return {**self._given, **asked}

    def _repeated(self, session: Session, frame: Frame) -> bool:
        """Whether this is a request that runs, which it then waits for, or the last one, whose answer is repeated."""
        key = (frame.op, frame.turn)
        if session.current == key:
            session.waiting.append(frame.request)
            return True
        if session.record is not None and session.record[:2] == key:
            self._executor.emit(_answer(frame, session.record[2], session.record[3]))
            return True
        return False

    def _call(self, session: Session, frame: Frame, run: Callable[[Call], Outcome | None], what: str) -> Call:
        session.current = (frame.op, frame.turn)
        session.waiting = [frame.request]

        def guarded() -> Outcome | None:
            try:
                return run(call)
            except OpenTinkerError as error:
                return ERROR, problem_body(error)
            except BaseException as error:  # raised by `close` of a late environment, or at the deadline
                return ERROR, problem_body(EnvironmentFailedError(f"{what} raised {type(error).__name__}: {error}"))

        def settle(outcome: Outcome) -> bytes:
            kind, body = outcome
            session.current = None
            session.record = (frame.op, frame.turn, kind, body)
            if kind == ERROR:
                session.failure = str(unpack(body).get("detail"))
            elif frame.op == STEP:
                session.expected += 1
                if kind == DONE:
                    session.over = _DONE
            elif frame.op == FINALIZE:
                session.over = "the session was finalized"
            waiting, session.waiting = session.waiting, []
            return b"".join(encode(frame.op, kind, frame.turn, request, frame.session, 0.0, body) for request in waiting)

        def expire() -> Outcome:
            if call.on_loop:
                self._coroutines.cancel(call)
            return ERROR, problem_body(DeadlineError(f"{what} did not return within {frame.timeout_s:.3g} s"))

        call = Call(frame.op, guarded, settle, expire, frame.timeout_s)
        return call

    def _invoke(self, call: Call, function: Callable[..., Any], what: str, convert: Convert, *args: Any) -> Outcome | None:
        with reported(what, function):
            value = function(*args)
        if isinstance(value, Awaitable):
            self._coroutines.start(call, value, what, function, convert)
            return None
        return convert(value)


def _overrides_check(environment: type[Environment]) -> bool:
    base: Any = Environment.check_tasks
    return getattr(environment.check_tasks, "__func__", None) is not base.__func__


def _stepped(result: Any, what: str) -> Outcome:
    checked = checked_step(result, what)
    body = _packed((checked.reward, checked.components, checked.observation, checked.metrics), what)
    return DONE if checked.done else OK, body


def _finalized(reward: Any, what: str) -> Outcome:
    checked = checked_step(StepResult(0.0 if reward is None else reward, done=True), what)
    return OK, _packed((checked.reward, checked.components), what)


def _packed(value: Any, what: str) -> bytes:
    try:
        body = pack(value)
    except InvalidRequestError as error:
        why = error.__cause__
        raise EnvironmentFailedError(f"{what} gave something that cannot be sent: {why}", hint=error.hint) from error
    if len(body) > MAX_ANSWER_BYTES:
        raise EnvironmentFailedError(f"{what} gave {len(body):,} bytes; at most {MAX_ANSWER_BYTES:,} can be sent")
    return body


def _answer(frame: Frame, kind: int, body: bytes) -> bytes:
    return encode(frame.op, kind, frame.turn, frame.request, frame.session, 0.0, body)
