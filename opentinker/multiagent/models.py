"""Players that are models elsewhere: asked over OpenAI's chat API, which most servers of models have."""

import asyncio
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

from opentinker.config.opponents import ChatModelConfig
from opentinker.env.environment import Message
from opentinker.errors import ConfigError, UnavailableError

FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
CONNECT_S = 10.0
TRANSIENT = frozenset({408, 409, 429})
"""With all of 500 and above: answers after which the same request may succeed."""
REFUSED = frozenset({401, 402, 403, 404, 405})
"""Answers that every other request would get, too: a wrong key, address or model's name."""
SHOWN = 300
"""Characters of an answer that an error repeats."""


class ChatModel:
    """One model of one server; `agent` is the seat it plays, which errors name. Its key is in no error and no log."""

    def __init__(self, agent: str, config: ChatModelConfig, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Raises: ConfigError when the variable that should hold the key is not set, or holds what cannot be sent."""
        self._agent = agent
        self._config = config
        self._key = os.environ.get(config.api_key_variable, "").strip() if config.api_key_secret else ""
        if config.api_key_secret and not self._key:
            raise ConfigError(
                f"agents.{agent}.model: the variable {config.api_key_variable} is not set, which holds its API key",
                hint=f"a submitted job gets it from your secret '{config.api_key_secret}'; here, set it in your environment",
            )
        if not self._key.isascii() or not self._key.isprintable():  # it would be repeated by who cannot send it
            raise ConfigError(
                f"agents.{agent}.model: what {config.api_key_variable} holds cannot be an API key",
                hint="a key is one line of printable ASCII",
            )
        self._url = f"{config.url.rstrip('/')}/chat/completions"
        self._transport = transport
        self._client: httpx.AsyncClient | None = None
        self._slots: asyncio.Semaphore | None = None

    async def ask(self, messages: Sequence[Message], seed: int) -> str:
        """What it says next.

        Raises:
            ConfigError: its server refuses the key, the address or the model's name; no other request would do better.
            UnavailableError: no answer after all attempts, or one that cannot be used.
        """
        # The client and its limit belong to the loop that asks.
        if self._client is None or self._slots is None:
            limits = httpx.Limits(max_connections=self._config.max_concurrent)
            self._client = httpx.AsyncClient(limits=limits, transport=self._transport, follow_redirects=False)
            self._slots = asyncio.Semaphore(self._config.max_concurrent)
        async with self._slots:
            return await self._attempts(self._client, self._body(messages, seed))

    async def close(self) -> None:
        if self._client is not None:
            await self._client.aclose()
        self._client = self._slots = None

    def _body(self, messages: Sequence[Message], seed: int) -> bytes:
        config = self._config
        chosen = {"temperature": config.temperature, "max_tokens": config.max_tokens, "stop": list(config.stop) or None}
        body = {
            "model": config.name,
            "messages": [_written(message) for message in messages],
            **{name: value for name, value in chosen.items() if value is not None},
            **({"seed": seed} if config.seeded else {}),
            **config.extra,
        }
        return json.dumps(body).encode()

    async def _attempts(self, client: httpx.AsyncClient, body: bytes) -> str:
        config = self._config
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        why = ""
        for attempt in range(config.retries + 1):
            told_s = 0.0
            started = time.monotonic()
            try:
                async with asyncio.timeout(config.timeout_s):
                    response = await client.post(
                        self._url,
                        content=body,
                        headers=headers,
                        timeout=httpx.Timeout(config.timeout_s, connect=min(CONNECT_S, config.timeout_s)),
                    )
            except TimeoutError:
                why = f"no answer within {config.timeout_s:g} s"
            except httpx.TimeoutException:
                why = f"no answer after {time.monotonic() - started:.3g} s"
            except httpx.TransportError as error:
                why = f"no connection: {error!r}"
            else:
                if response.is_success:
                    return self._text(response)
                why = f"{response.status_code}: {self._shown(response)}"
                if response.status_code in REFUSED:
                    raise ConfigError(
                        f"agents.{self._agent}.model: {config.url} refuses '{config.name}': {self._safe(why)}",
                        hint="url, name and api_key_secret say whom to ask, as whom",
                    )
                if response.status_code not in TRANSIENT and response.status_code < 500:
                    break
                told_s = _retry_after_s(response)
            if attempt < config.retries:
                pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**attempt) * random.uniform(0.5, 1.0)
                await asyncio.sleep(max(pause_s, told_s))
        raise UnavailableError(f"the model '{config.name}' at {config.url} did not answer: {self._safe(why)}")

    def _text(self, response: httpx.Response) -> str:
        try:
            content = response.json()["choices"][0]["message"]["content"]
        except (ValueError, KeyError, IndexError, TypeError):
            content = 0
        if content is None:  # nothing but reasoning, or a refusal: an empty answer
            return ""
        if not isinstance(content, str):
            raise UnavailableError(
                f"the model '{self._config.name}' at {self._config.url} gave no chat completion: {self._shown(response)}"
            )
        return content

    def _shown(self, response: httpx.Response) -> str:
        """What an answer says, short: the error's message where it has OpenAI's form."""
        try:
            found = response.json()["error"]
            text = str(found["message"] if isinstance(found, Mapping) else found)
        except (ValueError, KeyError, TypeError):
            text = response.text
        return self._safe(" ".join(text.split())[:SHOWN])

    def _safe(self, text: str) -> str:
        return text.replace(self._key, f"[secret {self._config.api_key_secret}]") if self._key else text


def _written(message: Message) -> dict[str, Any]:
    """A message in OpenAI's form; images become data URLs."""
    content = message["content"]
    if isinstance(content, str):
        return {"role": message["role"], "content": content}
    parts = [
        {"type": "text", "text": part["text"]}
        if part["type"] == "text"
        else {"type": "image_url", "image_url": {"url": part["image"].data_url()}}
        for part in content
    ]
    return {"role": message["role"], "content": parts}


def _retry_after_s(response: httpx.Response) -> float:
    try:
        return min(LONGEST_PAUSE_S * 4, max(0.0, float(response.headers.get("retry-after", "0"))))
    except ValueError:  # a date
        return 0.0
