"""The baseline of the overhead bench: a pass-through as one writes it with FastAPI and aiohttp, and nothing else."""

import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse


def make_app(engine_url: str) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False
        ) as session:
            app.state.session = session
            yield

    app = FastAPI(lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> StreamingResponse:
        body = await request.body()
        response = await request.app.state.session.post(
            f"{engine_url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        )

        async def relay() -> AsyncIterator[bytes]:
            try:
                async for data in response.content.iter_any():
                    yield data
            finally:
                response.close()

        return StreamingResponse(relay(), status_code=response.status, media_type="text/event-stream")

    return app


class AnnouncingServer(uvicorn.Server):
    """Says its URL once it answers."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        print(f"http://127.0.0.1:{self.servers[0].sockets[0].getsockname()[1]}", flush=True)


if __name__ == "__main__":
    app = make_app(sys.argv[1])
    AnnouncingServer(
        uvicorn.Config(app, port=0, loop="uvloop", http="httptools", log_level="warning", access_log=False)
    ).run()
