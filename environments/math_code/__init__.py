"""Mathematical problems with a Python tool: several turns, code in a sandbox, an answer judged by math-verify."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.env.parsing import boxed, fenced_code, outside_code, tool_calls
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.environments.math import GOLDS_CHECKED
from opentinker.environments.math.judging import UNANSWERED, check_gold, gold_of, judge, require_checker
from opentinker.environments.math.rows import rows
from opentinker.environments.sandbox import Execution, PythonSandbox, SandboxLimits, Walls, usable_walls
from opentinker.errors import ConfigError

PYTHON_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run Python code. Variables are kept between calls. Gives what the code prints, and the value of its "
        "last expression.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The code to run."}},
            "required": ["code"],
        },
    },
}
Calls = Literal["tool", "fenced"]
INSTRUCTIONS: dict[Calls, str] = {
    "tool": "You can run Python code with the tool `python`. When you know the answer, put it within \\boxed{}.",
    "fenced": "You can run Python code: write it in a ```python block and end your message; you get what it prints. Variables "
    "are kept between blocks. When you know the answer, put it within \\boxed{}.",
}
EXAMPLES: tuple[tuple[str, str, str, str], ...] = (
    (
        "Mia has 14 pears. She eats 3 and picks 8 more. How many pears does she have now?",
        "```python\nprint(14 - 3 + 8)\n```",
        "19",
        "She has \\boxed{19} pears.",
    ),
    (
        "What is $\\frac{1}{2} + \\frac{1}{3}$? Give a fraction in lowest terms.",
        "```python\nfrom fractions import Fraction\nprint(Fraction(1, 2) + Fraction(1, 3))\n```",
        "5/6",
        "It is \\boxed{\\frac{5}{6}}.",
    ),
    (
        "What is the remainder when $3^{100}$ is divided by 17?",
        "```python\nprint(3**100 % 17)\n```",
        "13",
        "The remainder is \\boxed{13}.",
    ),
)
"""Question, code, what it prints, answer: solved as earlier turns, where code is written in blocks."""
CALLS_PER_ACTION = 4
"""More calls in one message are refused: a step has a deadline."""
LAST_CALL = "[That was your last call. Give your answer within \\boxed{}.]"


class MathCode(Environment):
    r"""A problem that may be worked on with Python. A message that runs no code ends the episode; its `\boxed{}` is judged.

    `calls`: 'tool' declares a tool, and its results are tool messages; 'fenced' asks for ```python blocks and answers as the
    user, for models without tools in their chat template. Either way of calling is understood in both. A right answer earns 1,
    of which `format_reward` is for any answer in a box. `sandbox` says how code is walled in; without walls it does not start,
    unless `sandbox='unsafe_none'`. `packages` are importable in it, beside the standard library. With
    'fenced', `examples` (0 to 3) solved problems can precede the question.
    """

    task_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    host_args: ClassVar[tuple[str, ...]] = (
        "sandbox",
        "packages",
        "call_timeout_s",
        "memory_mib",
        "output_chars",
        "check_timeout_s",
    )

    def __init__(
        self,
        max_calls: int = 6,
        format_reward: float = 0.1,
        calls: Calls = "tool",
        examples: int = 0,
        instruction: str | None = None,
        sandbox: Walls = "auto",
        packages: Sequence[str] = ("sympy", "mpmath"),
        call_timeout_s: float = 5.0,
        memory_mib: int = 512,
        output_chars: int = 2000,
        check_timeout_s: float = 1.0,
    ) -> None:
        if calls not in INSTRUCTIONS:
            raise ConfigError(f"calls '{calls}' is not known", hint=f"take one of {', '.join(INSTRUCTIONS)}")
        if not 0 <= format_reward <= 1:
            raise ConfigError(f"format_reward is {format_reward}", hint="it is a part of the reward, from 0 to 1")
        if not 0 <= examples <= len(EXAMPLES) or (examples and calls != "fenced"):
            raise ConfigError(f"there are no {examples} examples", hint=f"0 to {len(EXAMPLES)}, and only with calls='fenced'")
        self._examples = EXAMPLES[:examples]
        self.tools = (PYTHON_TOOL,) if calls == "tool" else ()
        self._role = "tool" if calls == "tool" else "user"
        self._calls_left = max_calls
        self._format_reward = format_reward
        self._instruction = INSTRUCTIONS[calls] if instruction is None else instruction
        self._call_timeout_s = call_timeout_s
        self._check_timeout_s = check_timeout_s
        limits = SandboxLimits(memory_bytes=memory_mib << 20, output_bytes=4 * output_chars + 2000)
        self._output_chars = output_chars
        self._sandbox = PythonSandbox(sandbox, limits, tuple(packages))
        self._gold = ""
        self._counts = {"calls": 0.0, "malformed_calls": 0.0, "code_errors": 0.0, "code_timeouts": 0.0, "sandbox_lost": 0.0}

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        """The word problems of `math`.

        Raises:
            ConfigError: there is no checker, or no sandbox to be had.
        """
        require_checker()
        usable_walls(args.get("sandbox", "auto"))
        return ListTasks(list(rows(split)), shuffle=split == "train")

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a right answer is missing or cannot be read; there is no checker, or no sandbox to be had.
        """
        require_checker()
        usable_walls(args.get("sandbox", "auto"))
        for task in tasks.first(GOLDS_CHECKED):
            check_gold(gold_of(task["answer"]))

    def reset(self, task: Any) -> list[Message]:
        self._gold = gold_of(task["answer"])
        messages: list[Message] = []
        for question, code, printed, answer in self._examples:
            messages += [self._question(question), {"role": "assistant", "content": code}]
            messages += [{"role": "user", "content": f"Output:\n{printed}"}, {"role": "assistant", "content": answer}]
        return [*messages, self._question(str(task["question"]))]

    def step(self, action: Action) -> StepResult:
        codes, errors = self._asked(action.text)
        if not (codes or errors) or self._calls_left <= 0:
            return self._judged(action)
        replies = [self._run(code) for code in codes[:CALLS_PER_ACTION]]
        if len(codes) > CALLS_PER_ACTION:
            replies.append(f"[Only the first {CALLS_PER_ACTION} calls of a message are run.]")
        if errors:  # it counts as a call, or a policy could go on like that
            self._calls_left -= 1
            self._counts["malformed_calls"] += len(errors)
            replies += errors[:CALLS_PER_ACTION]
        if self._calls_left <= 0:
            replies[-1] += "\n" + LAST_CALL
        if self._role == "user":
            shown = "\n\n".join(f"Output:\n{reply}" for reply in replies)
            return StepResult(observation=shown, metrics=self._metrics())
        messages: list[Message] = [{"role": self._role, "content": reply} for reply in replies]
        return StepResult(observation=messages, metrics=self._metrics())

    def close(self) -> None:
        self._sandbox.close()

    def _question(self, text: str) -> Message:
        return {"role": "user", "content": f"{text}\n\n{self._instruction}" if self._instruction else text}

    def _asked(self, text: str) -> tuple[list[str], list[str]]:
        """The code that a message asks to run, and what is wrong with its malformed calls."""
        parsed = tool_calls(text, (PYTHON_TOOL,))
        codes = [str(call.arguments["code"]) for call in parsed.calls]
        if not codes and not parsed.errors and boxed(outside_code(text, "python")) is None:
            codes = fenced_code(text, "python")
        return codes, parsed.errors

    def _run(self, code: str) -> str:
        if self._calls_left <= 0:
            return "[No calls are left.]"
        self._calls_left -= 1
        execution = self._sandbox.run(code, self._call_timeout_s)
        self._counts["calls"] += 1
        self._counts["code_errors"] += execution.outcome == "error"
        self._counts["code_timeouts"] += execution.outcome in ("timeout", "killed")
        self._counts["sandbox_lost"] += execution.outcome in ("killed", "died")
        return self._shown(execution)

    def _shown(self, execution: Execution) -> str:
        text, limit = execution.output.rstrip(), self._output_chars
        if len(text) > limit:
            text = f"{text[: limit * 3 // 4]}\n[... output cut ...]\n{text[-limit // 4 :]}"
        note = {
            "ok": "" if text else "[no output]",
            "error": "" if text else "[error]",
            "timeout": f"[stopped after {self._call_timeout_s:g} s; variables are kept]",
            "killed": f"[killed after {self._call_timeout_s:g} s; all variables are gone]",
            "died": "[the interpreter ended; all variables are gone]",
        }[execution.outcome]
        return "\n".join(part for part in (text, note) if part)

    def _judged(self, action: Action) -> StepResult:
        judgement = judge(outside_code(action.text, "python"), self._gold, "boxed", self._check_timeout_s)
        reward = {
            "answer": (1.0 - self._format_reward) * judgement.right,
            "format": self._format_reward * judgement.found,
        }
        return StepResult(
            reward, done=True, metrics={**self._counts, **judgement.metrics, "truncated": float(action.truncated)}
        )

    def _metrics(self, judged: Mapping[str, float] = UNANSWERED, truncated: bool = False) -> dict[str, float]:
        """Also of the turns before the last: an episode that is cut short was not answered."""
        return {**self._counts, **judged, "truncated": float(truncated)}
