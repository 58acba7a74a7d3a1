"""HTTP client of the scheduler (synchronous; the routes are in docs/architecture.md)."""

import base64
import hashlib
import random
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any
from urllib.parse import quote

import httpx

from opentinker.checkpoint_names import split_policy
from opentinker.client.http import retry_after_s
from opentinker.errors import (
    AuthenticationError,
    DeadlineError,
    OpenTinkerError,
    RateLimitedError,
    UnavailableError,
    from_problem,
)

ATTEMPTS = 4
ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED"})
"""The states that a job does not leave."""
PAGE = 100
"""Jobs in one request."""
_TRANSIENT = frozenset({429, 502, 503, 504})


class SchedulerClient:
    """One method per route. Every request is idempotent, so transient failures are retried (bounded, jittered; where the answer
    says when, then, within the request's timeout).

    Raises (all methods): UnavailableError, DeadlineError, or the error that the scheduler reports.
    """

    def __init__(self, url: str, api_key: str, *, timeout_s: float = 30.0) -> None:
        self.url = url
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._http = self._connection()
        self._beats: httpx.Client | None = None

    def health(self) -> dict[str, Any]:
        return self._call("GET", "/health")

    def submit(self, config: Mapping[str, Any], *, code: bytes | None = None) -> dict[str, Any]:
        """Submit a job; `code` is a zip of the environment's folder."""
        body: dict[str, Any] = {"config": dict(config), "idempotency_key": uuid.uuid4().hex}
        if code is not None:
            body["code"] = {"zip": base64.b64encode(code).decode(), "sha256": hashlib.sha256(code).hexdigest()}
        return self._call("POST", "/v1/jobs", json=body)

    def jobs(
        self,
        *,
        states: Sequence[str] = (),
        kind: str | None = None,
        name: str | None = None,
        owner: str | None = None,
        limit: int | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Jobs, newest first: this key's, or those of `owner` ('*' = everybody), which administrators may ask for. `name` is a
        part of their names. The first page is fetched now, further ones when they are needed."""
        filters = {"state": list(states), "kind": kind, "name": name, "owner": owner}
        chosen: dict[str, Any] = {key: value for key, value in filters.items() if value}
        size = PAGE if limit is None else max(1, min(PAGE, limit))
        first = self._call("GET", "/v1/jobs", params={**chosen, "limit": size})
        return islice(self._pages(first, chosen), limit)

    def _pages(self, page: dict[str, Any], filters: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from page["jobs"]
        while page["next"] is not None:
            page = self._call("GET", "/v1/jobs", params={**filters, "limit": PAGE, "cursor": page["next"]})
            yield from page["jobs"]

    def job(self, job_id: str, *, wait_s: float = 0.0, state: str | None = None) -> dict[str, Any]:
        """A job; with `state`, waits up to `wait_s` until its state differs from it."""
        if state is None:
            return self._call("GET", _path(job_id))
        try:
            return self._call("GET", _path(job_id), params={"wait_s": wait_s, "state": state}, wait_s=wait_s)
        except RateLimitedError:  # too many wait already; looking is always possible
            return self._call("GET", _path(job_id))

    def events(self, job_id: str) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._call("GET", f"{_path(job_id)}/events")["events"]
        return events

    def heartbeat(self, job_id: str, *, timeout_s: float | None = None) -> dict[str, Any]:
        """Renew a lease. One attempt, on a connection that nothing else uses and no failed attempt has used: the caller beats
        again soon."""
        beats, self._beats = self._beats or self._connection(), None
        try:
            answer = self._call("POST", f"{_path(job_id)}/heartbeat", http=beats, timeout_s=timeout_s, attempts=1)
        except OpenTinkerError:
            beats.close()
            raise
        self._beats = beats
        return answer

    def complete(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"{_path(job_id)}/complete")

    def cancel(self, job_id: str) -> dict[str, Any]:
        return self._call("POST", f"{_path(job_id)}/cancel")

    def stop(self, job_id: str) -> dict[str, Any]:
        """End a job after a checkpoint, `stopped`. Writing it may take longer than this call: the job has ended when its state
        says so."""
        return self._call("POST", f"{_path(job_id)}/stop")

    def logs(self, job_id: str, *, offset: int = 0, source: str | None = None, server: str = "") -> dict[str, Any]:
        """{"text", "offset", "finished"}; `offset` continues where an earlier answer ended. `source` is "driver" or "server";
        None = the driver's, or the server's where there is no driver. `server` is one beside the job's own, whose log
        it is then.

        Raises:
            NotFoundError: the job has no such server; the hint names those that it has.
        """
        chosen = {**({"source": source} if source else {}), **({"server": server} if server else {})}
        return self._call("GET", f"{_path(job_id)}/logs", params={"offset": offset, **chosen})

    def metrics(self, job_id: str, *, after: int = 0) -> dict[str, Any]:
        """{"rows", "next", "finished"}; `after` is an earlier answer's `next`."""
        return self._call("GET", f"{_path(job_id)}/metrics", params={"after": after})

    def checkpoints(self, job_id: str) -> list[dict[str, Any]]:
        """The job's whole checkpoints, newest first; `ref` is what `start_from` takes."""
        found: list[dict[str, Any]] = self._call("GET", f"{_path(job_id)}/checkpoints")["checkpoints"]
        return found

    def tag_checkpoint(self, job_id: str, name: str, tag: str) -> dict[str, Any]:
        """Give the job's checkpoint `name` or `name@version` a tag, which another one loses; the checkpoint. One of a further
        policy of the job is called `policy/name`, here and below."""
        name, whose = _of_policy(name)
        return self._call("PUT", f"{_path(job_id)}/checkpoints/{name}/tags/{quote(tag, safe='')}", params=whose)

    def untag_checkpoint(self, job_id: str, tag: str) -> None:
        # A repeat after a lost answer would say that it is not there; so below.
        tag, whose = _of_policy(tag)
        self._call("DELETE", f"{_path(job_id)}/tags/{tag}", params=whose, attempts=1)

    def delete_checkpoint(self, job_id: str, name: str) -> None:
        """Delete the job's checkpoint `name@version` for good."""
        name, whose = _of_policy(name)
        self._call("DELETE", f"{_path(job_id)}/checkpoints/{name}", params=whose, attempts=1)

    def name_checkpoints(self, job_id: str, addresses: Sequence[str]) -> list[str]:
        """Let an interactive job that runs load checkpoints of other jobs, by their addresses; the exact ones."""
        params = {"address": list(addresses)}
        found: list[str] = self._call("POST", f"{_path(job_id)}/named-checkpoints", params=params)["checkpoints"]
        return found

    def models(self) -> list[dict[str, Any]]:
        """The models that a job's `base_model` can name."""
        found: list[dict[str, Any]] = self._call("GET", "/v1/models")["models"]
        return found

    def cluster(self) -> dict[str, Any]:
        return self._call("GET", "/v1/cluster")

    def close(self) -> None:
        self._http.close()
        if self._beats is not None:
            self._beats.close()

    def _connection(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers=self._headers, timeout=self._timeout_s)

    def _call(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, Any] | None = None,
        wait_s: float = 0.0,
        timeout_s: float | None = None,
        attempts: int = ATTEMPTS,
        http: httpx.Client | None = None,
    ) -> dict[str, Any]:
        timeout_s = (timeout_s or self._timeout_s) + wait_s
        error: OpenTinkerError = UnavailableError(f"no answer from {self.url}")
        ends = time.monotonic() + timeout_s
        attempt, told_s = 0, 0.0
        while attempt < attempts:
            if attempt or told_s:
                time.sleep(max(0.2 * 2**attempt * random.uniform(0.5, 1.0), told_s * random.uniform(1.0, 1.1)))
            told_s = 0.0
            attempt += 1
            try:
                response = (http or self._http).request(method, path, json=json, params=params, timeout=timeout_s)
            except (httpx.InvalidURL, httpx.UnsupportedProtocol) as cause:
                raise UnavailableError(f"'{self.url}' is not a cluster's URL: {cause}") from cause
            except httpx.TimeoutException:
                error = DeadlineError(f"{self.url} did not answer within {timeout_s:.0f} s")
                continue
            except httpx.TransportError as cause:
                error = UnavailableError(
                    f"cannot reach a cluster at {self.url}: {cause}", hint="is it running? `opentinker up` starts one"
                )
                continue
            if response.is_success:
                answer: dict[str, Any] = response.json() if response.content else {}
                return answer
            error = _error_of(response, self.url)
            if response.status_code not in _TRANSIENT:
                break
            told_s = retry_after_s(response)
            if time.monotonic() + told_s > ends:
                break  # it would be in vain
            if told_s and attempts > 1:
                attempt -= 1  # as long as it says when, and that is in time
        raise error


def _path(job_id: str) -> str:
    return f"/v1/jobs/{quote(job_id, safe='')}"


def _of_policy(name: str) -> tuple[str, dict[str, str]]:
    """(the name behind `policy/`, quoted; the parameters that say whose it is)."""
    policy, name = split_policy(name)
    return quote(name, safe=""), {} if policy is None else {"policy": policy}


def _error_of(response: httpx.Response, url: str) -> OpenTinkerError:
    try:
        problem = response.json()
    except ValueError:
        problem = None
    if not isinstance(problem, dict) or "code" not in problem:
        return UnavailableError(
            f"{url} answered {response.status_code} and no problem document", hint="is this an OpenTinker cluster's address?"
        )
    error = from_problem(problem)
    if isinstance(error, RateLimitedError):
        error.retry_after_s = retry_after_s(response) or error.retry_after_s
    if isinstance(error, AuthenticationError) and not error.hint:
        error.hint = "check the API key"
    return error
