"""Asks reward servers over HTTP: JSON there, JSON back; limited in time and number, patient with servers that are down.

1. A server error (5xx) and a connection that fails are tried again, with back-off; any other status, an answer that is no JSON,
   and an answer that does not come within the limit are failures at once. Grading twice must not matter.
2. At most `concurrency` requests to one server are under way; one that waits to be tried again holds no place.
3. What a server says is in the failure's text. It never becomes a number.
It does not know what is asked (remote, reward_model).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp

_FIRST_WAIT_S = 0.25
_LONGEST_WAIT_S = 10.0
_CONNECT_S = 5.0
_QUOTED_CHARS = 500
_IDLE_S = 2.0
"""An idle connection is closed here first, before a server does it at the moment of the next request."""


class RewardServerError(Exception):
    """There is no score; the text says why."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How a server is asked: seconds for an answer, requests at a time, and how often one is sent again."""

    timeout_s: float
    concurrency: int
    retries: int


class _TryAgainError(Exception):
    """This attempt failed in a way that another may not."""


class RewardServers:
    """The connections to all reward servers of a run; belongs to one event loop. `close` it."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits = limits
        self._places: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(limits.concurrency)
        )
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def get(self, url: str) -> Any:
        """Return the JSON of one GET, tried once.

        Raises:
            RewardServerError: there is none.
        """
        try:
            return await self._attempt("GET", url, None)
        except _TryAgainError as error:
            raise RewardServerError(str(error)) from error

    async def post(self, url: str, body: Any) -> Any:
        """Return the JSON that a server answers to a JSON body.

        Raises:
            RewardServerError: there is none, after all retries.
        """
        wait_s = _FIRST_WAIT_S
        for retries_left in range(self._limits.retries, -1, -1):
            try:
                async with self._places[urlsplit(url).netloc]:
                    return await self._attempt("POST", url, body)
            except _TryAgainError as error:
                if not retries_left:
                    tries = f", tried {self._limits.retries + 1} times" if self._limits.retries else ""
                    raise RewardServerError(f"{error}{tries}") from error
            # Half of it by chance, so that all who met the same failure do not come back in one instant.
            await asyncio.sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
        raise AssertionError("the last attempt returns or raises")

    async def _attempt(self, method: str, url: str, body: Any) -> Any:
        try:
            async with self._opened().request(method, url, json=body, allow_redirects=False) as response:
                text = await response.text(errors="replace")
                status = response.status
        except (
            aiohttp.ClientConnectionError
        ) as error:  # before TimeoutError: a connection that is not made is one too
            raise _TryAgainError(f"{url}: {error or type(error).__name__}") from error
        except aiohttp.ClientPayloadError as error:
            raise _TryAgainError(f"{url}: the answer broke off: {error}") from error
        except TimeoutError as error:
            raise RewardServerError(f"{url} did not answer within {self._limits.timeout_s:g} s") from error
        except (
            aiohttp.ClientError,
            ValueError,
        ) as error:  # an address that is none, an answer that is no HTTP
            raise RewardServerError(f"{url}: {type(error).__name__}: {error}") from error
        if status >= 500:
            raise _TryAgainError(f"{url} answered {status}: {_quoted(text)}")
        if status != 200:
            raise RewardServerError(f"{url} answered {status}: {_quoted(text)}")
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise RewardServerError(f"{url} answered what is no JSON: {_quoted(text)}") from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S),  # the places limit it
                timeout=aiohttp.ClientTimeout(
                    total=self._limits.timeout_s, sock_connect=min(_CONNECT_S, self._limits.timeout_s)
                ),
            )
        return self._session


def _quoted(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _QUOTED_CHARS else line[:_QUOTED_CHARS] + "..."
