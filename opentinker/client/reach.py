"""Which way to a job's server: its own address where that can be reached, else through the scheduler's."""

import logging
from collections.abc import Mapping
from typing import Literal
from urllib.parse import quote, urlsplit

import httpx

from opentinker.client.local import LOOPBACK

logger = logging.getLogger(__name__)
Connect = Literal["auto", "direct", "proxy"]
"""'auto' tries the server's own address once, when the job starts."""
PROBE_S = 2.0


def choose_endpoint(server: Mapping[str, str], scheduler_url: str, connect: Connect) -> str:
    """The address to use for a job's `server` (as its record describes it)."""
    direct = server["endpoint"]
    if connect == "direct" or "proxy" not in server:
        return direct
    if connect == "auto" and _same_side(direct, scheduler_url) and _answers(server):
        return direct
    if connect == "auto":
        logger.info("event=proxied endpoint=%s: not reachable from here, so the scheduler passes requests on", direct)
    return scheduler_url.rstrip("/") + server["proxy"]


def _same_side(endpoint: str, scheduler_url: str) -> bool:
    """Not so if the server listens on a loopback address of the scheduler's machine, which is another one than this."""
    return urlsplit(endpoint).hostname not in LOOPBACK or urlsplit(scheduler_url).hostname in LOOPBACK


def _answers(server: Mapping[str, str]) -> bool:
    """Whether the job's own server answers there. Behind a tunnel, something else may listen on that address of this machine:
    the token is sent only to what looks like a job server, and the policy has to be there."""
    policy = f"/v1/policies/{quote(server['policy'], safe='')}"
    headers = {"Authorization": f"Bearer {server['token']}"}
    try:
        with httpx.Client(base_url=server["endpoint"], timeout=PROBE_S) as http:
            healthy = http.get("/health")
            if healthy.status_code != 200 or healthy.json() != {"status": "ok"}:
                return False
            return http.get(policy, headers=headers).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return False
