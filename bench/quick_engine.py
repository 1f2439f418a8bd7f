"""An engine in a process of its own that answers every request after a set time, from answers made before.

1. It speaks the SGLang routes that a rollout worker asks (`strawflow.testing.fake_engine` does so for tests, and draws each
   token); here a request costs as little of the machine as a Python server can make it.
2. Bodies differ from each other and are sent as they lie; only their number of samples is looked at.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random

from aiohttp import web
from engine_program import EngineProgram

LABEL = "bench"
DISTINCT = 16


class QuickEngine(EngineProgram):
    """The engine's process; `url` is where it answers."""

    def __init__(self, *, tokens: int, samples: int, delay_s: float) -> None:
        super().__init__(__file__, tokens=tokens, samples=samples, delay_s=delay_s)


def _body(*, tokens: int, samples: int, seed: int) -> bytes:
    draw = random.Random(seed)

    def sample(number: int) -> dict[str, object]:
        ids = [draw.randrange(1000, 150_000) for _ in range(tokens)]
        return {
            "output_ids": ids,
            "meta_info": {
                "id": f"request-{number}",
                "finish_reason": {"type": "length"},
                "prompt_tokens": 8,
                "completion_tokens": tokens,
                "cached_tokens": 0,
                "weight_version": LABEL,
                "weight_versions": [{"version": LABEL, "start": 0, "end": tokens}],
                "output_token_logprobs": [[-draw.random(), token, None] for token in ids],
            },
        }

    made = [sample(number) for number in range(samples)]
    return json.dumps(made if samples > 1 else made[0]).encode()


async def _serve(*, tokens: int, samples: int, delay_s: float) -> None:
    bodies = [_body(tokens=tokens, samples=samples, seed=seed) for seed in range(DISTINCT)]
    label, count = LABEL, 0

    async def generate(_request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        await asyncio.sleep(delay_s)
        return web.Response(body=bodies[count % DISTINCT], content_type="application/json")

    async def update(_request: web.Request) -> web.Response:
        return web.json_response({"success": True, "message": ""})

    async def told(_request: web.Request) -> web.Response:
        return web.json_response({"weight_version": label, "version": "quick"})

    async def nothing(_request: web.Request) -> web.Response:
        return web.Response()

    application = web.Application()
    application.add_routes(
        [
            web.get("/health", nothing),
            web.get("/model_info", told),
            web.get("/server_info", told),
            web.post("/generate", generate),
            web.post("/abort_request", nothing),
            web.post("/update_weights_from_disk", update),
        ]
    )
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--delay-s", type=float, required=True)
    found = parser.parse_args()
    asyncio.run(_serve(tokens=found.tokens, samples=found.samples, delay_s=found.delay_s))
