"""A vision-language policy learns a small geometry task by RL through the whole stack, and only from what it sees."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image as Pillow
from PIL import ImageDraw
from test_server import Server, serving
from vlm_tools import IMAGE_SIZE, build_tiny_vlm

from opentinker.client.messages import AdamParams, Datum, LossConfig, Minibatch, TokenChunk, chunk_tokens
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
POOL = 512
"""Pictures to learn from; others are held out."""
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


class Bars(Environment):
    """Say how wide the bar is; with `blank` nothing is there to be seen, and with `late` it is shown in the second turn."""

    def __init__(self, blank: bool = False, late: bool = False) -> None:
        self._blank, self._late = blank, late

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"seed": seed % POOL}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"seed": POOL + number} for number in range(96)]

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
            "evaluation": {"max_tasks": 96, "samples_per_task": 4},
            "training": {"steps": steps, "optimizer": {"learning_rate": learning_rate}},
        },
    )


async def warm_up(client: PolicyClient, steps: int, learning_rate: float) -> None:
    """Imitate right answers, until the policy knows what an answer looks like and something of what is right."""
    tokenizer = ChatTokenizer.from_files(await client.tokenizer_files())
    info = await client.info()
    renderer = ConversationRenderer(tokenizer, info["stop_token_ids"], image_placeholder=info["image_placeholder"])
    for step in range(steps):
        pairs = [drawn((64 * step + number) % POOL) for number in range(64)]
        images = await client.upload([image.data for image, _ in pairs])
        data = []
        for image, width in pairs:
            parts = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
            prompt = renderer.render_prompt([{"role": "user", "content": parts}], (), images)  # type: ignore[typeddict-item]
            answer = np.asarray(tokenizer.encode(f"{width}<|im_end|>"), np.int32)
            everything = chunk_tokens((*prompt, TokenChunk(answer)))  # type: ignore[arg-type]
            weights = (np.arange(len(everything) - 1) >= len(everything) - 1 - len(answer)).astype(np.float32)
            data.append(Datum((*prompt, TokenChunk(answer[:-1])), everything[1:], {"weights": weights}))  # type: ignore[arg-type]
        factor = 1.0 / sum(float(datum.weights.sum()) for datum in data)
        minibatch = Minibatch(indices=tuple(range(len(data))), factor=factor)
        loss = LossConfig(name="cross_entropy")
        last = step == steps - 1
        result = await client.train_step(data, [minibatch], loss, AdamParams(learning_rate=learning_rate), publish=last)
        if step % 20 == 0:
            print("warm", step, result["minibatches"][0]["loss"])


async def trained(server: Server, folder: Path, steps: int, learning_rate: float, **environment: bool) -> dict[str, Any]:
    await server.client.load("warm")
    config = job(steps, learning_rate, **environment)
    recorder = Recorder(
        folder,
        config.model_dump(mode="json"),
        listeners=(
            lambda row: print(
                {k: row[k] for k in row if k in ("step", "reward_mean", "exact", "seconds", "mismatch_kl_mean", "wall_s")}
            ),
        ),
    )
    loop = await RLLoop.connect(config, Bars, server.client, recorder)
    await loop.run(steps)
    summary = recorder.finish(wall_s=0.0, checkpoint=None)
    summary["rows"] = recorder.rows
    return summary


async def test_rl_improves_a_warmed_up_policy_and_does_not_without_a_learning_rate_or_without_anything_to_see(
    tmp_path: Path,
) -> None:
    import os
    import time

    model_dir = build_tiny_vlm(tmp_path / "model")
    async with serving(model_dir, tmp_path / "checkpoints") as server:
        t = time.time()
        await warm_up(server.client, int(os.environ.get("WS", 100)), float(os.environ.get("WLR", 1e-3)))
        print("warm", time.time() - t)
        await server.client.save("warm")
        t = time.time()
        s = await trained(server, tmp_path / "rl", int(os.environ.get("RS", 30)), float(os.environ.get("RLR", 1e-3)))
        print({k: s[k] for k in s if k != "rows"}, time.time() - t)
        print(list(s["rows"][2]))
