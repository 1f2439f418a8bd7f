"""Connections to an engine: an idle one is given up before the engine would close it; what a router is told."""

from __future__ import annotations

import asyncio
import time

import pytest

from strawflow.errors import EngineError
from strawflow_workers.rollout.sglang_client import GenerateRequest, SglangClient

SERVER_KEEPS_IDLE_S = 5.0
"""What SGLang's server (uvicorn) does by default."""


def test_an_idle_connection_is_closed_before_the_server_would_close_it() -> None:
    """Otherwise a request sent just then is lost: connection reset, server disconnected."""
    idle_s: list[float] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        answered_at = time.monotonic()
        assert await asyncio.wait_for(reader.read(1), 30) == b""  # the client hung up
        idle_s.append(time.monotonic() - answered_at)
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with SglangClient(f"http://127.0.0.1:{port}") as client:
            assert await client.server_info() == {}
            while not idle_s:
                await asyncio.sleep(0.05)
        server.close()

    asyncio.run(run())
    assert 0 < idle_s[0] < SERVER_KEEPS_IDLE_S


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_router_is_told_which_group_a_request_belongs_to(is_streamed: bool) -> None:
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with SglangClient(url) as client:
            for turn in ("u7.3.m0.0", "u7.3.m0.1"):
                request = GenerateRequest(input_ids=[1], rid=turn)
                with pytest.raises(EngineError):
                    await client.generate(request, on_progress=(lambda *_: None) if is_streamed else None)
        server.close()

    asyncio.run(run())
    assert [b"X-SMG-Routing-Key: u7\r\n" in head for head in asked] == [True, True]
