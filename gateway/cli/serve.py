"""`headstart serve`: the gateway's HTTP server."""

import gc
import ipaddress
import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvicorn

from gateway.cli.http_guard import BoundedHeadProtocol
from gateway.cli.terminal import FAILURE, USAGE, CliError, err, given, load_settings
from gateway.http import AsgiApp, AsgiMessage, Receive, Scope, Send
from gateway.logs import configure
from gateway.peers import Worker
from gateway.reload import Reread
from gateway.settings import Settings
from gateway.tenants import KeyFileError, load_tenants
from gateway.workers import Supervisor, WorkerFailed
from retrieval.folder import FolderInUse, supervised_folder

SHUTDOWN_LIMIT_S = 15
KEEP_ALIVE_S = 75
BACKLOG = 2048
YOUNG_OBJECTS = 5_000
"""So many more objects than before make the garbage collector look for cycles among them."""


def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = None,
    engine_url: Annotated[
        str | None, typer.Option(help="Base URL of the engine, without /v1; several separated by commas.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of the database and the files.")] = None,
    no_auth: Annotated[
        bool, typer.Option("--no-auth", help="Allow an address other than loopback without keys.")
    ] = False,
    workers: Annotated[int, typer.Option(min=1, max=64, help="Processes that serve the port together.")] = 1,
) -> None:
    """Start the gateway. Settings come from HEADSTART_* variables and headstart.toml; options win."""
    options = given(host=host, port=port, engine_url=engine_url, data_dir=data_dir, no_auth=True if no_auth else None)
    settings = load_settings(**options)
    refuse_open_door(settings)
    if workers > 1:
        refuse_strangers(settings)
    listener = bind(settings.host, settings.port)
    reread = partial(Settings, **options)
    try:
        if workers > 1:
            run_workers(workers, ServeWorker(settings, listener, reread))
        else:
            run_server(settings, reread, AnnouncingServer, listener)
    finally:
        listener.close()


def refuse_strangers(settings: Settings) -> None:
    """Raises CliError (2) when workers could not tell each other anything."""
    if not settings.redis_url:
        raise CliError(
            "Several workers share conversations, and what each engine holds, through Redis: set "
            "HEADSTART_REDIS_URL, or leave --workers out.",
            USAGE,
        )


def run_workers(count: int, serve_worker: "ServeWorker") -> None:
    """Raises CliError (1) when the data folder is in use, and ends with status 1 when a worker cannot start."""
    url = url_of(serve_worker.listener)
    supervisor = Supervisor(count, serve_worker, lambda: announce(url), stop_limit_s=2 * SHUTDOWN_LIMIT_S)
    try:
        with supervised_folder(serve_worker.settings.data_dir):
            supervisor.run()
    except (FolderInUse, OSError) as error:
        raise CliError(f"The gateway cannot start: {error}") from error
    except WorkerFailed as failed:
        raise typer.Exit(FAILURE) from failed


@dataclass(frozen=True, slots=True)
class ServeWorker:
    """What one worker's process does: the gateway on the port that all of them accept on."""

    settings: Settings
    listener: socket.socket
    reread: Reread

    def __call__(self, worker: Worker, ready: Callable[[], None]) -> None:
        def server_of(config: uvicorn.Config, url: str) -> "WorkerServer":
            return WorkerServer(config, ready)

        try:
            run_server(self.settings, self.reread, server_of, self.listener, worker)
        except CliError as error:
            err().print(f"headstart: {error.message}", markup=False, soft_wrap=True)
            raise SystemExit(error.exit_code) from error


def refuse_open_door(settings: Settings) -> None:
    """Raises CliError (2) when anybody on the network could use the gateway without a key."""
    try:
        keyless = load_tenants(settings.api_keys, settings.api_keys_file, b"").keyless
    except KeyFileError as error:
        raise CliError(str(error), USAGE) from error
    if keyless and not settings.no_auth and not is_loopback(settings.host):
        raise CliError(
            f"Refusing to listen on {settings.host} without API keys: anybody who reaches it could use it. Make a "
            "key with 'headstart key TENANT' and set HEADSTART_API_KEYS_FILE, or give --no-auth.",
            USAGE,
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises CliError: 1 when the port is taken, 2 when the address is not one of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise CliError(f"'{host}' is not an address to listen on.", USAGE) from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CliError(
            f"Cannot listen on {host}:{port}: {error.strerror}. Stop what uses it, or give another --port.", FAILURE
        ) from error
    return listener


def run_server(
    settings: Settings,
    reread: Reread,
    server_of: "Callable[[uvicorn.Config, str], GatewayServer]",
    listener: socket.socket,
    worker: Worker | None = None,
) -> None:
    """Serves until SIGINT or SIGTERM, then lets requests end for at most `SHUTDOWN_LIMIT_S`.

    SIGHUP, or a change of headstart.toml, has the engines of `reread` instead.
    Raises CliError (1) when the application cannot start.
    """
    from gateway.app import create_app  # brings in FAISS and the embedding libraries: only where it is served

    configure(settings.log_format, settings.log_level)
    try:
        startup = StartupErrors(create_app(settings, reread, worker))
    except (KeyFileError, OSError) as error:
        raise CliError(f"The gateway cannot start: {error}") from error
    config = server_config(startup)
    server = server_of(config, url_of(listener))
    try:
        server.run(sockets=[listener])
    except SystemExit as error:
        if startup.error is None:
            raise
        raise CliError(f"The gateway cannot start: {startup.error}") from error


def server_config(app: AsgiApp) -> uvicorn.Config:
    """How the gateway is served: uvloop, a bounded request head, no access log."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=BoundedHeadProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        # Nothing depends on the client's address or scheme: what a proxy says of them is not read.
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_LIMIT_S,
    )


class GatewayServer(uvicorn.Server, ABC):
    """Ends quietly after a signal."""

    @abstractmethod
    def answers(self) -> None:
        """Called once, as soon as requests are answered."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            settle_memory()
            self.answers()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Some libraries complain at the interpreter's end of objects that were never looked through.
        gc.unfreeze()
        await super().shutdown(sockets=sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        with super().capture_signals():
            yield
            # uvicorn would raise the signal again; to stop when told is a success here.
            self._captured_signals.clear()


class AnnouncingServer(GatewayServer):
    """Says in one line where it listens once it answers."""

    def __init__(self, config: uvicorn.Config, url: str) -> None:
        super().__init__(config)
        self._url = url

    def answers(self) -> None:
        announce(self._url)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            print("Headstart stops; a second Ctrl-C does not wait for requests.", file=sys.stderr, flush=True)
        super().handle_exit(sig, frame)


class WorkerServer(GatewayServer):
    """Tells its supervisor that it answers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    def answers(self) -> None:
        self._ready()


def announce(url: str) -> None:
    print(f"Headstart listens on {url}", flush=True)


def settle_memory() -> None:
    """What was loaded at the start stays for good: the collector need not look through it again and again.

    Libraries and models are millions of objects; a full collection over them stops everything for a quarter second.
    Requests leave hardly any cycles. The default is to look for some every 700 objects, each time through all ids of
    the prompts that are being made: several times in one of 100,000 tokens, for a millisecond each.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])


class StartupErrors:
    """Keeps the error that ended the application's start, so that it is told in one line and not as a traceback."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self.error: Exception | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        answered = False

        async def answer(message: AsgiMessage) -> None:
            nonlocal answered
            answered = True
            await send(message)

        async def unheard(message: AsgiMessage) -> None:
            if message["type"] != "lifespan.startup.failed":
                await answer(message)

        try:
            await self._app(scope, receive, unheard)
        except Exception as error:
            if answered:
                raise
            self.error = error
            failed: dict[str, Any] = {"type": "lifespan.startup.failed", "message": ""}
            await send(failed)


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
