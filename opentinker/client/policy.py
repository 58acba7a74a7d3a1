"""The client of one policy on a job server."""

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np

from opentinker.client import wire
from opentinker.client.http import Deadline, HttpClient
from opentinker.client.messages import (
    AdamParams,
    Datum,
    FloatArray,
    IntArray,
    LossConfig,
    Minibatch,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TokenChunk,
    TokenScore,
)
from opentinker.errors import from_problem

POLL_S = 20.0
"""How long one poll is held by the server."""
COMMAND_DEADLINE_S = 3600.0

Prompt = Sequence[int] | IntArray | Sequence[TokenChunk]


class PolicyClient:
    """Samples from a policy and trains it. Commands run on the server in the order of the calls, each exactly once however
    often the connection breaks; samples run concurrently.

    All methods raise UnavailableError, DeadlineError, ServerLostError, or the error that the server reports.
    """

    def __init__(self, endpoint: str, token: str, policy: str) -> None:
        self.policy = policy
        self._http = HttpClient(endpoint, token)
        self._path = f"/v1/policies/{quote(policy, safe='')}"
        self._numbering = asyncio.Lock()
        self._next_seq: int | None = None

    async def info(self) -> dict[str, Any]:
        """base_model, engine, max_model_len, vocab_size, stop_token_ids, device."""
        info: dict[str, Any] = await self._http.request("GET", "/v1/info")
        return info

    async def tokenizer_files(self) -> dict[str, bytes]:
        """tokenizer.json, tokenizer_config.json and chat_template.jinja, as far as the model has them."""
        files: dict[str, bytes] = (await self._http.request("GET", "/v1/tokenizer"))["files"]
        return files

    async def state(self) -> dict[str, Any]:
        """policy, version, next_seq."""
        state: dict[str, Any] = await self._http.request("GET", self._path)
        return state

    async def sample(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        n: int = 1,
        request_id: str | None = None,
        prompt_logprobs: bool = False,
        version: int | None = None,
        deadline_s: float = 300.0,
    ) -> SampleResult:
        """Sample `n` continuations of `prompt`. Repeating a call with its `request_id` gives the first call's answer.

        With a `version`, all tokens are that version's.

        Raises:
            VersionNotServedError: `version` is not the live one, or a publish with mode 'abort' replaced it meanwhile.
        """
        request = SampleRequest(request_id or uuid.uuid4().hex, _chunks(prompt), params, n, prompt_logprobs, version)
        deadline = Deadline(deadline_s)
        wait_s = min(POLL_S, deadline_s)
        operation = await self._http.request(
            "POST", f"{self._path}/sample", content=wire.pack(request.to_wire()), wait_s=wait_s, deadline_s=deadline_s
        )
        return SampleResult.from_wire(await self._result(operation, deadline))

    async def forward(
        self, data: Sequence[Datum], *, compute: Sequence[TokenScore] = ("logprobs",), temperature: float = 1.0
    ) -> dict[TokenScore, list[FloatArray]]:
        """What was asked for of every weighted target (0 elsewhere), float32[T] per datum; no gradient.

            scores = await policy.forward(data, compute=("logprobs", "reference_logprobs", "entropy"))
            log_ratio_T = scores["logprobs"][0] - scores["reference_logprobs"][0]

        `temperature` divides the logits of the policy and of the reference alike.

        Raises:
            InvalidRequestError: the policy cannot give one of them (no policy has a value head yet).
        """
        args = {"data": _wire(data), "compute": list(compute), "temperature": temperature}
        result = await self.command("forward", args)
        return {name: [np.asarray(score, np.float32) for score in result[name]] for name in compute}

    async def forward_backward(self, data: Sequence[Datum], loss: LossConfig, *, factor: float = 1.0) -> dict[str, Any]:
        """Accumulate gradients of factor * (sum of the loss): loss, metrics, logprobs."""
        args = {"data": _wire(data), "loss": loss.model_dump(), "factor": factor}
        return await self.command("forward_backward", args)

    async def optim_step(self, params: AdamParams) -> dict[str, Any]:
        """One AdamW step on the accumulated gradients: grad_norm."""
        return await self.command("optim_step", params.model_dump())

    async def train_step(
        self,
        data: Sequence[Datum],
        minibatches: Sequence[Minibatch],
        loss: LossConfig,
        optimizer: AdamParams,
        *,
        publish: bool = True,
    ) -> dict[str, Any]:
        """One optimizer step per minibatch, then a publish: minibatches, version, publish."""
        args = {
            "data": _wire(data),
            "minibatches": [m.model_dump() for m in minibatches],
            "loss": loss.model_dump(),
            "optimizer": optimizer.model_dump(),
            "publish": publish,
        }
        return await self.command("train_step", args)

    async def publish(self, mode: str = "drain") -> dict[str, Any]:
        """Sample from the trained weights from now on: version, parameters, drift, baseline, changed, seconds."""
        return await self.command("publish", {"mode": mode})

    async def save(self, name: str) -> dict[str, Any]:
        """Write a checkpoint: path, name, version, manifest."""
        return await self.command("save", {"name": name})

    async def load(self, name: str) -> dict[str, Any]:
        """Restore and publish a checkpoint, the newest of `name` or `name@version`: version and the rest of a publish."""
        return await self.command("load", {"name": name})

    async def command(self, command: str, args: dict[str, Any], *, deadline_s: float = COMMAND_DEADLINE_S) -> dict[str, Any]:
        """Run any command of the server's table and return its result."""
        deadline = Deadline(deadline_s)
        # The lock is held only until the server has accepted the command: from then on the server keeps the order.
        async with self._numbering:
            seq = self._next_seq if self._next_seq is not None else (await self.state())["next_seq"]
            self._next_seq = None  # unknown until accepted: a refused command does not use its number up
            body = wire.pack({"seq": seq, "command": command, "args": args})
            operation = await self._http.request("POST", f"{self._path}/commands", content=body, deadline_s=deadline.left_s())
            self._next_seq = seq + 1
        result: dict[str, Any] = await self._result(operation, deadline)
        return result

    async def close(self) -> None:
        await self._http.close()

    async def _result(self, operation: dict[str, Any], deadline: Deadline) -> Any:
        while operation["status"] == "pending":
            left_s = deadline.left_s()
            path = f"/v1/operations/{quote(operation['operation_id'], safe='')}"
            operation = await self._http.request("GET", path, wait_s=min(POLL_S, left_s), deadline_s=left_s)
        if operation["problem"] is not None:
            raise from_problem(operation["problem"])
        return operation["result"]


def _chunks(prompt: Prompt) -> tuple[TokenChunk, ...]:
    if not isinstance(prompt, np.ndarray) and len(prompt) and isinstance(prompt[0], TokenChunk):
        return tuple(chunk for chunk in prompt if isinstance(chunk, TokenChunk))
    return (TokenChunk(np.asarray(prompt, np.int32)),)


def _wire(data: Sequence[Datum]) -> list[dict[str, Any]]:
    return [datum.to_wire() for datum in data]
