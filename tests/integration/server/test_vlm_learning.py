"""A vision-language policy learns a small geometry task by RL through the whole stack, and only from what it sees."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL import ImageDraw
from server_tools import Server, serving
from trainer_tools import assert_same, weights
from vlm_tools import IMAGE_SIZE, build_tiny_vlm

from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch, TokenChunk, as_chunks, chunk_tokens
from opentinker.client.policy import PolicyClient
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.images import Image
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.recorder import Recorder
from opentinker.training.rl import RLLoop

LENGTHS = range(1, 5)
UNIT = IMAGE_SIZE // 4
POOL, HELD_OUT = 256, 96
"""Pictures to learn from, and others to judge by."""
WARM_UP_STEPS, RL_STEPS, BLIND_STEPS, LEARNING_RATE = 36, 20, 8, 1e-3
QUESTION = "How wide is the bar?"


def drawn(seed: int, blank: bool = False) -> tuple[Image, int]:
    """A bar that reaches some units from the left side into the picture, at any height, and how many they are."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(LENGTHS.start, LENGTHS.stop))
    top = int(rng.integers(0, IMAGE_SIZE - 8 + 1))
    shade = tuple(int(value) for value in rng.integers(0, 120, 3))
    picture = Pillow.new("RGB", (IMAGE_SIZE, IMAGE_SIZE), "white")
    if not blank:
        ImageDraw.Draw(picture).rectangle((0, top, width * UNIT - 1, top + 7), fill=shade)
    out = io.BytesIO()
    picture.save(out, "PNG")
    return Image(out.getvalue()), width


def question(picture: Image) -> list[Message]:
    return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": QUESTION}]}]


class Bars(Environment):
    """Say how wide the bar is; with `blank` nothing is there to be seen, and with `late` it is shown in the second turn."""

    def __init__(self, blank: bool = False, late: bool = False) -> None:
        self._blank, self._late = blank, late

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"seed": seed % POOL}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"seed": POOL + number} for number in range(HELD_OUT)]

    def reset(self, task: Mapping[str, int]) -> str | list[Message]:
        self._picture, self._width = drawn(task["seed"], self._blank)
        return "What do you see?" if self._late else self._show()

    def _show(self) -> list[Message]:
        return [{"role": "user", "content": [{"type": "image", "image": self._picture}, {"type": "text", "text": QUESTION}]}]

    def step(self, action: Action) -> StepResult:
        if self._late:
            self._late = False
            return StepResult(observation=self._show())
        exact = float(action.text.strip() == str(self._width))
        return StepResult(exact, True, metrics={"exact": exact})


def job(steps: int, learning_rate: float, **environment: bool) -> RLJobConfig:
    return parse_config(
        RLJobConfig,
        {
            "base_model": "unused",
            "engine": {"max_model_len": 256},
            "environment": {"name": "unused:Bars", "args": environment},
            "algorithm": {"group_size": 8},
            "sampling": {"max_tokens": 4},
            "rollout": {"groups_per_step": 16},
            "evaluation": {"max_tasks": HELD_OUT, "samples_per_task": 4},
            "training": {"steps": steps, "optimizer": {"learning_rate": learning_rate}, "decay": "linear"},
        },
    )


async def warm_up(client: PolicyClient, steps: int, learning_rate: float) -> list[float]:
    """Imitate right answers, until the policy knows what an answer looks like and something of what is right; the losses."""
    tokenizer = ChatTokenizer.from_files(await client.tokenizer_files())
    info = await client.info()
    renderer = ConversationRenderer(tokenizer, info["stop_token_ids"], image_placeholder=info["image_placeholder"])
    losses = []
    for step in range(steps):
        pairs = [drawn((64 * step + number) % POOL) for number in range(64)]
        images = await client.upload([image.data for image, _ in pairs])
        data = []
        for image, width in pairs:
            prompt = as_chunks(renderer.render_prompt(question(image), (), images))
            answer = np.asarray(tokenizer.encode(f"{width}<|im_end|>"), np.int32)
            everything = chunk_tokens((*prompt, TokenChunk(answer)))
            weights = (np.arange(len(everything) - 1) >= len(everything) - 1 - len(answer)).astype(np.float32)
            data.append(Datum((*prompt, TokenChunk(answer[:-1])), everything[1:], {"weights": weights}))
        minibatch = Minibatch(indices=tuple(range(64)), factor=1.0 / sum(float(datum.weights.sum()) for datum in data))
        result = await client.train_step(
            data,
            [minibatch],
            LossConfig(name="cross_entropy"),
            AdamParams(learning_rate=learning_rate),
            publish=step == steps - 1,
        )
        losses.append(float(result["minibatches"][0]["loss"]))
    return losses


async def trained(server: Server, folder: Path, steps: int, learning_rate: float, **environment: bool) -> dict[str, Any]:
    """The summary and the rows of a run from the warmed-up policy."""
    await server.client.load("warm")
    config = job(steps, learning_rate, **environment)
    recorder = Recorder(folder, config.model_dump(mode="json"))
    loop = await RLLoop.connect(config, Bars, server.client, recorder)
    await loop.run(steps)
    summary = recorder.finish(wall_s=0.0, checkpoint=None) | {"rows": recorder.rows}
    exact = [round(row["exact"], 2) for row in recorder.rows]
    print(f"{folder.name}: held out {exact[0]} -> {exact[-1]} (+-{summary['exact_ci']:.2f}), steps {exact[1:-1]}")
    return summary


async def test_rl_improves_a_warmed_up_policy_and_does_not_without_a_learning_rate_or_without_anything_to_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # the model is so small that threads only wait for each other
    async with serving(build_tiny_vlm(tmp_path / "model"), tmp_path / "checkpoints") as server:
        losses = await warm_up(server.client, WARM_UP_STEPS, 1e-3)
        assert losses[-1] < losses[0] / 3
        await server.client.save("warm")

        seeing = await trained(server, tmp_path / "seeing", RL_STEPS, LEARNING_RATE)
        assert seeing["exact_before"] < 0.75
        assert seeing["exact_after"] > seeing["exact_before"] + 2 * seeing["exact_ci"]
        assert abs(seeing["mismatch_kl_mean"]) < 1e-4, "the trainer sees what the engine saw, pictures included"

        still = await trained(server, tmp_path / "still", 1, 0.0)
        assert abs(still["exact_after"] - still["exact_before"]) <= 2 * still["exact_ci"]
        unmoved = weights(server.parts.trainer, "p")
        await server.client.load("warm")
        assert_same(unmoved, weights(server.parts.trainer, "p"))

        blind = await trained(server, tmp_path / "blind", BLIND_STEPS, LEARNING_RATE, blank=True)
        widths = [drawn(task["seed"])[1] for task in Bars.held_out_tasks()]
        commonest = max(widths.count(width) for width in LENGTHS) / len(widths)
        assert blind["exact_after"] <= commonest + blind["exact_ci"], "nobody can do better by guessing"

        late = await trained(server, tmp_path / "late", 1, LEARNING_RATE, late=True)
        (first,) = (row for row in late["rows"] if row["kind"] == "step")
        assert first["turns_mean"] == 2.0
        assert abs(late["mismatch_kl_mean"]) < 1e-4, "also of a picture that comes after an action"
