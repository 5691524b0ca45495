"""Settings that are read again while the gateway runs: at SIGHUP, and when their file changed."""

import asyncio
import logging
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from gateway.settings import Settings, what_is_wrong

log = logging.getLogger("headstart.reload")

Reread = Callable[[], Settings]

_Signature = tuple[int, int, int] | None


class SettingsFile:
    """The settings that the gateway started with against those that would be read now."""

    def __init__(self, started_with: Settings, reread: Reread, file: Path | None = None) -> None:
        """`reread` raises ValueError or OSError for settings that cannot be read."""
        self._started_with = started_with
        self._reread = reread
        # The working directory may change; the file that was read at the start may not.
        self._file = (file or Path(str(Settings.model_config["toml_file"]))).absolute()
        self._signature: _Signature = None

    async def changed(self) -> bool:
        """Whether the file came, went or was written since the last time this was asked."""
        before, self._signature = self._signature, await asyncio.to_thread(self._look)
        return before != self._signature

    async def read_engines(self) -> str | None:
        """`engine_url` as it is set now; None, with the reason in the log, when the settings cannot be read.

        Where it is set nowhere any more it is None too: a file that is gone, or that an editor has just emptied to
        write it anew, is no wish for the default engine.
        """
        try:
            settings = await asyncio.to_thread(self._reread)
        except (ValueError, OSError) as error:
            log.warning("the settings cannot be read and nothing changed: %s", what_is_wrong(error))
            return None
        except RecursionError:
            # Its traceback would fill the log.
            log.warning("the settings cannot be read and nothing changed: the file nests too deep")
            return None
        if "engine_url" in self._started_with.model_fields_set - settings.model_fields_set:
            log.warning("engine_url is not set any more and nothing changed")
            return None
        waiting = [
            name
            for name in Settings.model_fields
            if name != "engine_url" and getattr(settings, name) != getattr(self._started_with, name)
        ]
        if waiting:
            log.warning("the settings were read again; a restart is needed for: %s", ", ".join(waiting))
        else:
            log.info("the settings were read again")
        return settings.engine_url

    def _look(self) -> _Signature:
        try:
            status = self._file.stat()
        except OSError:
            return None
        return status.st_mtime_ns, status.st_size, status.st_ino


class Hangup:
    """SIGHUP as an event. Only a process's main thread may have it; elsewhere it never comes."""

    def __init__(self) -> None:
        self._came = asyncio.Event()
        self._installed = False

    def install(self) -> None:
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._came.set)
            self._installed = True

    def remove(self) -> None:
        if self._installed:
            asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)

    async def wait(self) -> None:
        """Until it came since the last time that this ended."""
        await self._came.wait()
        self._came.clear()
