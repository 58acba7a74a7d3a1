"""The client of one policy on a job server."""

import asyncio
import hashlib
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import numpy as np

from opentinker.client import wire
from opentinker.client.http import Deadline, HttpClient
from opentinker.client.messages import (
    AdamParams,
    Chunk,
    CriticStep,
    Datum,
    FloatArray,
    ImageChunk,
    IntArray,
    LossConfig,
    Minibatch,
    SampleRequest,
    SampleResult,
    SamplingParams,
    TokenScore,
    as_chunks,
)
from opentinker.config.server import LoraConfig
from opentinker.errors import ImageMissingError, from_problem

POLL_S = 20.0
"""How long one poll is held by the server."""
COMMAND_DEADLINE_S = 3600.0
UPLOAD_DEADLINE_S = 300.0
UPLOAD_BYTES = 64 * 2**20
"""Images that travel in one request, unless one alone is larger."""
IMAGE_ATTEMPTS = 3
"""How often a request is sent whose images the server has dropped."""

Prompt = Sequence[int] | IntArray | Sequence[Chunk]


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
        self._uploading = asyncio.Lock()
        self._uploaded: dict[str, IntArray] = {}
        """The tokens of each image that was sent, by its hash."""
        self._expansions: dict[bytes, IntArray] = {}
        self._created: dict[str, PolicyClient] = {}

    async def create_policy(
        self,
        lora: LoraConfig,
        *,
        name: str = "",
        seed: int = 0,
        critic: LoraConfig | None = None,
        deadline_s: float = COMMAND_DEADLINE_S,
    ) -> "PolicyClient":
        """Create another policy on this policy's server: an adapter with an optimizer, versions and checkpoints of its own, on
        the same frozen base model and in the same batches of the engine. Its client, which this one closes with itself. With
        `critic` it has one of its own, for PPO, as a further adapter of the trainer's.

            critic = await policy.create_policy(LoraConfig(rank=8), name="critic")
            await asyncio.gather(policy.sample(prompt, params), critic.sample(prompt, params))
            await policy.delete_policy("critic")

        Raises:
            ConflictError: there is one of this name, this policy trains the full parameters, or the server has no room:
                `engine.max_adapters` of the job's config says for how many it has.
            ConfigError: the adapter fits no layer, or its rank is above that of the job's own.
        """
        deadline = Deadline(deadline_s)
        # The name makes a request that is sent again find what it has created.
        body = {
            "policy": name or f"policy-{uuid.uuid4().hex[:12]}",
            "spec": {
                "lora": lora.model_dump(mode="json"),
                "seed": seed,
                **({} if critic is None else {"critic": critic.model_dump(mode="json")}),
            },
        }
        answer = await self._http.request(
            "POST", "/v1/policies", content=wire.pack(body), wait_s=min(POLL_S, deadline_s), deadline_s=deadline_s
        )
        await self._result(answer["operation"], deadline)
        created = PolicyClient(self._http.endpoint, answer["token"], answer["policy"])
        self._created[created.policy] = created
        return created

    async def delete_policy(self, policy: str, *, deadline_s: float = COMMAND_DEADLINE_S) -> None:
        """Free everything of a policy that `create_policy` made, once its running samples have ended; its checkpoints stay.

        Raises:
            NotFoundError: there is no such policy.
        """
        deadline = Deadline(deadline_s)
        path = f"/v1/policies/{quote(policy, safe='')}"
        operation = await self._http.request("DELETE", path, wait_s=min(POLL_S, deadline_s), deadline_s=deadline_s)
        await self._result(operation, deadline)
        if (created := self._created.pop(policy, None)) is not None:
            await created.close()

    async def info(self) -> dict[str, Any]:
        """base_model, engine, max_model_len, vocab_size, stop_token_ids, device, and image_placeholder: the text that the chat
        template puts for an image, None if the model takes none."""
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

    async def upload(self, images: Iterable[bytes]) -> dict[str, ImageChunk]:
        """Give the server images (whole PNG, JPEG or WebP files) that prompts and data will show, each sent once however often
        this is called; the chunk that stands for each, by the SHA-256 of its bytes.

            (chunk,) = (await policy.upload([png])).values()
            await policy.sample([TokenChunk(before), chunk, TokenChunk(after)], params)

        Raises:
            InvalidRequestError: an image is broken or too large, or the model takes none.
        """
        wanted = {hashlib.sha256(data).hexdigest(): data for data in images}
        # One at a time: whoever waits finds that another has sent the image meanwhile.
        async with self._uploading:
            for part in _parts({sha256: data for sha256, data in wanted.items() if sha256 not in self._uploaded}):
                body = wire.pack({"images": list(part.values())})
                answer = await self._http.request("POST", f"{self._path}/images", content=body, deadline_s=UPLOAD_DEADLINE_S)
                for sha256 in part:
                    tokens = np.asarray(answer["images"][sha256]["tokens"], np.int32)
                    # Images of one size have the same tokens: they are kept once.
                    self._uploaded[sha256] = self._expansions.setdefault(tokens.tobytes(), tokens)
            return {sha256: ImageChunk(sha256, self._uploaded[sha256], data) for sha256, data in wanted.items()}

    async def _upload_again(self, chunks: Iterable[Chunk], error: ImageMissingError) -> None:
        """Send what the server has dropped.

        Raises:
            ImageMissingError: an image was never uploaded through `upload`, so that its bytes are not known here.
        """
        images = [chunk for chunk in chunks if isinstance(chunk, ImageChunk)]
        found = [image.data for image in images if image.data is not None]
        if not images or len(found) < len(images):
            raise error
        for image in images:
            self._uploaded.pop(image.sha256, None)
        await self.upload(found)

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

        With a `version`, all tokens are that version's: the live one's, or, where adapters are served, one of the newest few
        (`engine.kept_versions`).

        Raises:
            VersionNotServedError: `version` is not served, or a publish with mode 'abort' replaced it meanwhile.
        """
        request = SampleRequest(request_id or uuid.uuid4().hex, as_chunks(prompt), params, n, prompt_logprobs, version)
        deadline = Deadline(deadline_s)
        for attempt in range(1, IMAGE_ATTEMPTS + 1):
            left_s = deadline.left_s()
            operation = await self._http.request(
                "POST",
                f"{self._path}/sample",
                content=wire.pack(request.to_wire()),
                wait_s=min(POLL_S, left_s),
                deadline_s=left_s,
            )
            try:
                return SampleResult.from_wire(await self._result(operation, deadline))
            except ImageMissingError as error:
                if attempt == IMAGE_ATTEMPTS:
                    raise
                await self._upload_again(request.prompt, error)
                # The old id would only find the failure again.
                request = replace(request, request_id=f"{request.request_id[:190]}~{attempt}")
        raise AssertionError("the last attempt returns or raises")

    async def forward(
        self, data: Sequence[Datum], *, compute: Sequence[TokenScore] = ("logprobs",), temperature: float = 1.0
    ) -> dict[TokenScore, list[FloatArray]]:
        """What was asked for of every weighted target (0 elsewhere), float32[T] per datum; no gradient.

            scores = await policy.forward(data, compute=("logprobs", "reference_logprobs", "entropy"))
            log_ratio_T = scores["logprobs"][0] - scores["reference_logprobs"][0]

        `temperature` divides the logits of the policy and of the reference alike.

        Raises:
            InvalidRequestError: the policy cannot give one of them: `values` are of one with a critic or a scalar head.
        """
        args = {"data": _wire(data), "compute": list(compute), "temperature": temperature}
        result = await self._train("forward", args, data)
        return {name: [np.asarray(score, np.float32) for score in result[name]] for name in compute}

    async def forward_backward(self, data: Sequence[Datum], loss: LossConfig, *, factor: float = 1.0) -> dict[str, Any]:
        """Accumulate gradients of factor * (sum of the loss): loss, metrics, logprobs; or, of a loss of scalars, values."""
        args = {"data": _wire(data), "loss": loss.model_dump(), "factor": factor}
        return await self._train("forward_backward", args, data)

    async def optim_step(self, params: AdamParams, *, critic: bool = False) -> dict[str, Any]:
        """One AdamW step on the accumulated gradients, with `critic` on those of the policy's critic: grad_norm."""
        return await self.command("optim_step", {**params.model_dump(), **({"critic": True} if critic else {})})

    async def train_step(
        self,
        data: Sequence[Datum],
        minibatches: Sequence[Minibatch],
        loss: LossConfig,
        optimizer: AdamParams,
        *,
        critic: CriticStep | None = None,
        publish: bool = True,
    ) -> dict[str, Any]:
        """One optimizer step per minibatch, of the policy and, where asked for, of its critic, then a publish: minibatches,
        version, publish, memory_bytes."""
        args = {
            "data": _wire(data),
            "minibatches": [m.model_dump() for m in minibatches],
            "loss": loss.model_dump(),
            "optimizer": optimizer.model_dump(),
            "publish": publish,
            **({} if critic is None else {"critic": critic.model_dump()}),
        }
        return await self._train("train_step", args, data)

    async def _train(self, command: str, args: dict[str, Any], data: Sequence[Datum]) -> dict[str, Any]:
        """A command on data whose images the server may have dropped: then it did nothing, and is given anew."""
        for _ in range(IMAGE_ATTEMPTS - 1):
            try:
                return await self.command(command, args)
            except ImageMissingError as error:
                await self._upload_again((chunk for datum in data for chunk in datum.chunks), error)
        return await self.command(command, args)

    async def publish(self, mode: str = "drain") -> dict[str, Any]:
        """Sample from the trained weights from now on: version, parameters, drift, baseline, changed, seconds."""
        return await self.command("publish", {"mode": mode})

    async def save(self, name: str, *, driver: Mapping[str, Any] | None = None, keep_last: int | None = None) -> dict[str, Any]:
        """Write a checkpoint: path, name, version, manifest, pruned.

        `driver` is what a `load` gives back: whatever goes on from the checkpoint has to know, as JSON holds it. With
        `keep_last`, of the checkpoints whose names differ in the number at their end only (`step-000010`), all but that many of
        the newest are deleted, and listed in `pruned`; those that have a tag, or that a job started from, stay.
        """
        args: dict[str, Any] = {"name": name}
        if driver is not None:
            args["driver"] = dict(driver)
        if keep_last is not None:
            args["keep_last"] = keep_last
        return await self.command("save", args)

    async def load(self, name: str) -> dict[str, Any]:
        """Restore and publish a checkpoint, the newest of `name`, `name@version` or a tag, or another job's that this one
        names, by its address: version and the rest of a publish, and `driver`, what its save was given."""
        return await self.command("load", {"name": name})

    async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]:
        """Take the weights of a checkpoint, and nothing else of it, as the next version: version and the rest of a publish. The
        optimizer starts anew, and no number of the checkpoint's is taken over.

        It is one of this policy, or, with `policy`, of another one of this server, by its name, `name@version` or tag; or one
        of another job, by its address: those that this job names where it is submitted, such as `create_job(checkpoints=...)`.

        Raises:
            CheckpointError: there is none, it is corrupt, or it does not fit this policy's adapter or base model.
            InvalidRequestError: the job does not name a checkpoint of this address.
        """
        return await self.command("load_weights", {"name": name, **({"policy": policy} if policy else {})})

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
        for created in self._created.values():
            await created.close()
        await self._http.close()

    async def _result(self, operation: dict[str, Any], deadline: Deadline) -> Any:
        while operation["status"] == "pending":
            left_s = deadline.left_s()
            path = f"/v1/operations/{quote(operation['operation_id'], safe='')}"
            operation = await self._http.request("GET", path, wait_s=min(POLL_S, left_s), deadline_s=left_s)
        if operation["problem"] is not None:
            raise from_problem(operation["problem"])
        return operation["result"]


def _parts(images: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """The images in parts that one request may carry."""
    part: dict[str, bytes] = {}
    for sha256, data in images.items():
        if part and sum(map(len, part.values())) + len(data) > UPLOAD_BYTES:
            yield part
            part = {}
        part[sha256] = data
    if part:
        yield part


def _wire(data: Sequence[Datum]) -> list[dict[str, Any]]:
    return [datum.to_wire() for datum in data]
