"""A simulated engine with the OpenAI surface of vLLM: `python -m bench.engine_sim --port 0`, or in process."""

import argparse
import asyncio
import contextlib
import json
import socket
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Self

import uvloop

from bench.sim.api import Api
from bench.sim.config import Answer, AnswerContext, Fault, SimConfig, ToolCall
from bench.sim.faults import FaultBox
from bench.sim.generation import RecordedRequest
from bench.sim.http import Connection
from bench.sim.tokens import load_tokenizer
from latency.model import PrefillModel

__all__ = ["Answer", "AnswerContext", "EngineSim", "Fault", "RecordedRequest", "SimConfig", "ToolCall"]


class EngineSim:
    """`async with EngineSim(SimConfig(...)) as sim:` serves at `sim.url` on the running loop."""

    def __init__(self, config: SimConfig | None = None, host: str = "127.0.0.1", port: int = 0) -> None:
        self.config = config or SimConfig()
        self.host, self.port = host, port
        self.tokenizer = load_tokenizer(self.config.model_dir, self.config.bytes_per_token)
        self._faults = FaultBox(self.config.faults)
        self._api = Api(self.config, self.tokenizer, self._faults)
        self._connections: set[Connection] = set()
        self._server: asyncio.Server | None = None
        self._stepper: asyncio.Task[None] | None = None
        self._deaf: list[socket.socket] = []

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    @property
    def url(self) -> str:
        """Base URL, without `/v1`."""
        return f"http://{self.host}:{self.port}"

    @property
    def requests(self) -> deque[RecordedRequest]:
        """Requests since the last start, oldest first, the last `recorded_requests` of them."""
        return self._api.requests

    @property
    def generations(self) -> list[RecordedRequest]:
        """The recorded requests that asked for an answer."""
        return [r for r in self.requests if r.path.endswith("/completions")]

    @property
    def aborted(self) -> deque[RecordedRequest]:
        """Requests whose client went away before their end; `aborted_s` is the loop's time."""
        return self._api.aborted

    @property
    def open_streams(self) -> int:
        """Generations that are being answered, streamed or not."""
        return self._api.open_streams

    @property
    def open_connections(self) -> int:
        """Client connections, idle ones included."""
        return len(self._connections)

    @property
    def buffered_bytes(self) -> int:
        """Bytes that wait for slow clients, over all connections."""
        return sum(connection.buffered_bytes for connection in self._connections)

    @property
    def api(self) -> Api:
        """The engine process behind the URL: its `engine`, `pool` and `metrics`."""
        return self._api

    def set_fault(self, fault: Fault) -> None:
        """The fault strikes the next `fault.count` requests on its path, after those already set."""
        self._faults.add(fault)

    def clear_faults(self) -> None:
        """Forget faults that have not struck."""
        self._faults.clear()

    async def start(self) -> None:
        """Listen, as a new process with an empty cache; the port stays the same from start to start."""
        self._api = Api(self.config, self.tokenizer, self._faults)
        self._stepper = asyncio.create_task(self._api.engine.run())
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._api.handle, self._connections), self.host, self.port, backlog=1024
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self, reset: bool = True) -> None:
        """Die: connections are cut (RST unless `reset` is false) and new ones are refused."""
        for deaf in self._deaf:
            deaf.close()
        self._deaf.clear()
        if self._server is not None:
            self._server.close()
            self._server = None
        connections = list(self._connections)
        for connection in connections:
            connection.abort(reset)
        for connection in connections:
            await connection.wait_closed()
        if self._stepper is not None:
            self._stepper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._stepper
            self._stepper = None

    async def restart(self) -> None:
        """Die and come back on the same address with an empty cache and no memory of earlier requests."""
        await self.stop()
        await self.start()

    async def stop_accepting(self) -> None:
        """Die, and leave the address in a state where connecting hangs instead of being refused."""
        await self.stop()
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((self.host, self.port))
        listener.listen(0)
        self._deaf.append(listener)
        # The kernel accepts connections until its queue is full; these fill it.
        for _ in range(4):
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex((self.host, self.port))
            self._deaf.append(filler)

    async def wait_until_idle(self, timeout_s: float = 2.0) -> None:
        """Wait until no generation is open. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._api.idle.wait()


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_sim", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="sim-model")
    parser.add_argument("--model-dir", type=Path, help="folder with tokenizer.json and a chat template")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-gpu-blocks", type=int, default=65_536)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--surface", choices=("vllm", "minimal"), default="vllm")
    parser.add_argument("--no-prompt-tokens-details", action="store_true")
    parser.add_argument("--prefill", type=float, nargs=3, metavar=("A_S", "B_S", "G_S"), help="a, b, g in seconds")
    parser.add_argument("--fixed-ttft-ms", type=float, help="instead of queue and prefill model")
    parser.add_argument("--inter-chunk-ms", type=float, default=0.0, help="with --fixed-ttft-ms")
    parser.add_argument("--time-scale", type=float, default=1.0)
    parser.add_argument("--decode-tokens-per-s", type=float, default=30.0, help="0: the whole answer at once")
    parser.add_argument("--answer", default="cite", help="cite, echo, words or text:...")
    parser.add_argument("--answer-words", type=int, default=32)
    parser.add_argument("--coalesce", action="store_true", help="one write for all chunks that are ready")
    parser.add_argument("--record", type=int, default=0, help="requests kept in memory")
    return parser.parse_args(arguments)


def _config(arguments: argparse.Namespace) -> SimConfig:
    defaults = SimConfig()
    fixed_ms = arguments.fixed_ttft_ms
    return SimConfig(
        model=arguments.model,
        model_dir=arguments.model_dir,
        max_model_len=arguments.max_model_len,
        block_size=arguments.block_size,
        num_gpu_blocks=arguments.num_gpu_blocks,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        surface=arguments.surface,
        prompt_tokens_details=not arguments.no_prompt_tokens_details,
        prefill=PrefillModel(*arguments.prefill) if arguments.prefill else defaults.prefill,
        fixed_ttft_s=None if fixed_ms is None else fixed_ms / 1000,
        inter_chunk_s=arguments.inter_chunk_ms / 1000,
        time_scale=arguments.time_scale,
        decode_tokens_per_s=arguments.decode_tokens_per_s or None,
        answer=arguments.answer,
        answer_words=arguments.answer_words,
        coalesce=arguments.coalesce,
        recorded_requests=arguments.record,
    )


async def _serve(arguments: argparse.Namespace) -> None:
    async with EngineSim(_config(arguments), arguments.host, arguments.port) as sim:
        print(json.dumps({"url": sim.url, "model": sim.config.model}), flush=True)
        await asyncio.Event().wait()


def main(arguments: list[str] | None = None) -> None:
    """Serve until interrupted; the first line on standard output is `{"url": ..., "model": ...}`."""
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(_serve(_parse(arguments)))


if __name__ == "__main__":
    main()
