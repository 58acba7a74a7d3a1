"""Environments made with verifiers up to 0.3, as an installed package has them."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def exact(completion: Any, answer: str, **_: Any) -> float:
    return float(completion[-1]["content"].strip() == answer)


def short(completion: Any, **_: Any) -> float:
    return float(len(completion[-1]["content"]) < 20)


def length(completion: Any, **_: Any) -> float:
    return float(len(completion[-1]["content"]))


def found(state: Any, **_: Any) -> float:
    return float(state.get("final_env_response") is not None)


def together(completions: Any, **_: Any) -> list[float]:
    return [0.0 for _ in completions]


def double(x: int) -> int:
    """Twice a number.

    Args:
        x: the number
    """
    return 2 * x


class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        guess, secret = messages[-1]["content"], int(state["answer"])
        if guess == "crash":
            raise vf.ToolError("its own fault")
        if guess == "bug":
            raise ZeroDivisionError("a bug of its author")
        if guess == str(secret):
            state["final_env_response"] = [vf.UserMessage(content="Yes.")]
            return []
        return [vf.UserMessage(content="Higher." if guess.isdigit() and int(guess) < secret else "Lower.")]


class Rewriting(Guess):
    async def get_prompt_messages(self, state: Any) -> Any:
        return [vf.UserMessage(content=f"Turn {len(state['trajectory'])}.")]


class Broken(Guess):
    async def setup_state(self, state: Any) -> Any:
        raise vf.ToolError("no room")


def load_environment(kind: str = "single", rows: int = 5) -> vf.Environment:
    data = Dataset.from_list([{"question": f"{a} + {a}?", "answer": str(2 * a)} for a in range(rows)])
    if kind == "single":
        rubric = vf.Rubric(funcs=[exact, short, length], weights=[1.0, 0.2, 0.0])
        held_out = Dataset.from_list([{"question": "50 + 50?", "answer": "100"}])
        return vf.SingleTurnEnv(dataset=data, eval_dataset=held_out, system_prompt="Add.", rubric=rubric)
    if kind == "eval_only":
        return vf.SingleTurnEnv(eval_dataset=data, rubric=vf.Rubric(funcs=[exact]))
    if kind == "tool":
        return vf.ToolEnv(dataset=data, tools=[double], rubric=vf.Rubric(funcs=[exact]), max_turns=4)
    if kind == "together":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[together]))
    made = {"guess": Guess, "rewriting": Rewriting, "broken": Broken}[kind]
    return made(dataset=data, rubric=vf.Rubric(funcs=[found]), max_turns=6)
