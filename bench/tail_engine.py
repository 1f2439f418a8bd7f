"""An engine whose responses have log-normal lengths, each token taking a set time however many run: for scenes with a long tail.

1. It speaks the SGLang routes that a rollout worker asks; an abort ends requests with what they have.
2. A member's length is a function of its name (the rid of its request), so a response that was broken off and goes on has the
   length it would have had. Tokens and log-probabilities are constants: nobody reads them here.
3. `GET /made` tells how many tokens it sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import time
import urllib.request
from typing import Any

from aiohttp import web
from engine_program import EngineProgram

LABEL = "bench"
_RID = re.compile(r"u(\d+)\.\d+\.m(\d+)")
_TOKEN, _EOS = 65, 257


class TailEngine(EngineProgram):
    """The engine's process; `url` is where it answers."""

    def __init__(self, *, median: int, sigma: float, max_tokens: int, token_s: float) -> None:
        super().__init__(__file__, median=median, sigma=sigma, max_tokens=max_tokens, token_s=token_s)

    def num_made(self) -> int:
        """Return how many tokens it has sampled."""
        with urllib.request.urlopen(f"{self.url}/made", timeout=10) as answer:
            return int(json.loads(answer.read()))


class _Server:
    def __init__(self, *, median: int, sigma: float, max_tokens: int, token_s: float) -> None:
        self._median, self._sigma, self._max_tokens, self._token_s = median, sigma, max_tokens, token_s
        self._label, self._num_made = LABEL, 0
        self._aborted = asyncio.Event()

    def length(self, unit: int, member: int) -> int:
        drawn = random.Random(f"{unit}.{member}").lognormvariate(math.log(self._median), self._sigma)
        return max(1, min(self._max_tokens, round(drawn)))

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        params = body["sampling_params"]
        done = self._max_tokens - params["max_new_tokens"]
        named = _RID.match(body["rid"])
        assert named is not None
        unit, first = map(int, named.groups())
        left = [self.length(unit, first + place) - done for place in range(params.get("n", 1))]
        started = time.monotonic()
        try:
            async with asyncio.timeout(max(left) * self._token_s):
                await self._aborted.wait()
            passed = int((time.monotonic() - started) / self._token_s)
        except TimeoutError:
            passed = max(left)
        samples = [self._told(tokens, passed) for tokens in left]
        return web.json_response(samples if len(samples) > 1 else samples[0])

    def _told(self, left: int, passed: int) -> dict[str, Any]:
        num = min(left, passed)
        self._num_made += num
        ids = [_TOKEN] * num
        if num == left:
            ids[-1] = _EOS
        return {
            "output_ids": ids,
            "meta_info": {
                "id": "request",
                "finish_reason": {"type": "stop" if num == left else "abort"},
                "prompt_tokens": 8,
                "completion_tokens": num,
                "cached_tokens": 0,
                "weight_version": self._label,
                "output_token_logprobs": [[-0.5, token, None] for token in ids],
            },
        }

    async def abort(self, _request: web.Request) -> web.Response:
        self._aborted.set()
        self._aborted = asyncio.Event()
        return web.Response()

    async def update(self, request: web.Request) -> web.Response:
        self._label = (await request.json())["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def info(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": "tail", "weight_version": self._label})

    async def made(self, _request: web.Request) -> web.Response:
        return web.json_response(self._num_made)

    async def healthy(self, _request: web.Request) -> web.Response:
        return web.Response()


async def _serve(server: _Server) -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_post("/update_weights_from_disk", server.update)
    app.router.add_get("/model_info", server.info)
    app.router.add_get("/server_info", server.info)
    app.router.add_get("/made", server.made)
    app.router.add_get("/health", server.healthy)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    print(f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--median", type=int, required=True)
    parser.add_argument("--sigma", type=float, required=True)
    parser.add_argument("--max-tokens", type=int, required=True)
    parser.add_argument("--token-s", type=float, required=True)
    asyncio.run(_start(vars(parser.parse_args())))


async def _start(options: dict[str, Any]) -> None:
    await _serve(_Server(**options))


if __name__ == "__main__":
    main()
