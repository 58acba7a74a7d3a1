"""An engine whose samples are written down, or read from what was written down: vLLM promises no batch invariance on the CPU,
so that a run on it repeats only if its trajectories do."""

import dataclasses
import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from opentinker.client.messages import SampleRequest, SampleResult, chunk_tokens
from opentinker.errors import EngineError
from opentinker.server.engine.base import AdapterId, RolloutEngine


def key_of(request: SampleRequest) -> str:
    """The same for the same prompt and parameters; a rollout's seed says which run, step, task, member and turn it is."""
    asked = [chunk_tokens(request.prompt).tolist(), request.params.model_dump(mode="json"), request.n]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()


class RecordedEngine:
    """Samples with `engine`, or with its recording; weights, adapters and scores are always the engine's own."""

    def __init__(self, engine: RolloutEngine, file: Path, *, replay: bool) -> None:
        self._engine, self._file, self._replay = engine, file, replay
        self._asked: dict[str, SampleRequest] = {}
        self._versions: dict[str, int] = {}
        self._answers: dict[str, Any] = {}
        if replay:
            for line in file.read_text().splitlines():
                entry = json.loads(line)
                self._answers[entry["key"]] = entry["result"]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add(self, request: SampleRequest, adapter: AdapterId | None = None) -> None:
        if not self._replay:
            self._engine.add(request, adapter)
        elif key_of(request) not in self._answers:
            raise EngineError(f"the recording has no answer to request {request.request_id}: this run has gone another way")
        self._asked[request.request_id] = request
        self._versions[request.request_id] = self._engine.version if adapter is None else adapter.version

    def has_unfinished(self) -> bool:
        return bool(self._asked) if self._replay else self._engine.has_unfinished()

    def step(self) -> list[SampleResult]:
        if self._replay:
            results = [self._recorded(request) for request in self._asked.values()]
            self._asked.clear()
            return results
        results = self._engine.step()
        with self._file.open("a") as file:
            for result in results:
                entry = {"key": key_of(self._asked.pop(result.request_id)), "result": as_json(result)}
                file.write(json.dumps(entry) + "\n")
        return results

    def _recorded(self, request: SampleRequest) -> SampleResult:
        found = SampleResult.from_wire({**self._answers[key_of(request)], "request_id": request.request_id})
        version = self._versions.pop(request.request_id)
        samples = tuple(dataclasses.replace(s, versions=((version, len(s.tokens)),)) for s in found.samples)
        return dataclasses.replace(found, samples=samples)

    def abort(self, request_ids: Collection[str]) -> list[SampleRequest]:
        given_up = [self._asked.pop(name) for name in request_ids if name in self._asked]
        return given_up if self._replay else self._engine.abort(request_ids)

    def abort_all(self) -> list[SampleRequest]:
        return self.abort(list(self._asked))


def as_json(result: SampleResult) -> dict[str, Any]:
    """Of arrays as lists, which give the same float32 back."""
    body = result.to_wire()
    samples = [{**s, "tokens": s["tokens"].tolist(), "logprobs": s["logprobs"].tolist()} for s in body["samples"]]
    return {**body, "samples": samples, "prompt_logprobs": None}
