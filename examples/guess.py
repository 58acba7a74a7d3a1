"""Teach a small language model to guess a number: an environment and ten lines.

Start a cluster with `opentinker up`, then run `python examples/guess.py`.
"""

import random
from typing import Any

import opentinker as ot


class Guess(ot.Environment):
    """The policy has four tries to find a number between 1 and 9; the reply says higher or lower."""

    def reset(self, task: Any) -> str:
        self.number = random.Random(task["seed"]).randint(1, 9)
        self.tries = 0
        return "I think of a number between 1 and 9. Answer with your guess, a single number and nothing else."

    def step(self, action: ot.Action) -> ot.StepResult:
        self.tries += 1
        said = action.text.strip()
        if said == str(self.number):
            return ot.StepResult(reward=1.25 - 0.25 * self.tries, done=True)
        lost = self.tries == 4
        if not said.isdigit():
            return ot.StepResult(observation="That is not a number. Guess again.", done=lost)
        answer = "Higher." if int(said) < self.number else "Lower."
        return ot.StepResult(observation=f"{answer} Guess again.", reward=0.02, done=lost)


if __name__ == "__main__":
    with ot.Client("http://127.0.0.1:8780") as client:  # noqa: SIM117
        with client.create_job(base_model="smollm2-135m", lora=ot.LoraConfig(rank=16)) as job:
            trainer = ot.RLTrainer(
                job,
                environment=Guess,
                algorithm=ot.GRPO(group_size=8),
                sampling=ot.SamplingConfig(max_tokens=4),
                optimizer=ot.AdamParams(learning_rate=2e-4),
            )
            trainer.fit(steps=50)
            job.save("guess-v1")
