"""Keeps an engine from outliving the process that started it; run as a process of its own.

    python -m gateway.engine.guard GRACE_S COMMAND...

Standard input is a pipe that the owner holds open and never writes to. When the owner ends, however it ends, the
kernel closes the pipe, and the guard stops the engine with all of its processes. A death signal set in the engine
would reach its first process only, and would fire when a thread of the owner ends.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

OWNER_GONE = signal.SIGUSR1
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def run(grace_s: float, command: list[str]) -> int:
    """Runs `command` in a process group of its own; returns its status when it ends.

    SIGTERM, SIGINT and the end of standard input stop the group: SIGTERM first, SIGKILL after `grace_s` seconds.
    """
    stop_signals = (signal.SIGTERM, signal.SIGINT, OWNER_GONE)
    signal.pthread_sigmask(signal.SIG_BLOCK, (*stop_signals, signal.SIGCHLD))
    # where SIGCHLD is ignored, as it is by default, sigwait may never see it
    signal.signal(signal.SIGCHLD, lambda *_: None)
    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=_before_exec)
    threading.Thread(target=_watch_owner, daemon=True).start()
    while engine.poll() is None:
        received = signal.sigwait((*stop_signals, signal.SIGCHLD))
        if received != signal.SIGCHLD:
            _signal_group(engine.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):  # what is left is killed below
                engine.wait(grace_s)
            break
    _end_group(engine.pid, grace_s)
    return engine.wait()


def _before_exec() -> None:
    """Runs in the engine between fork and exec. It must not inherit the blocked mask, or it would never see SIGTERM.

    On Linux it also asks for SIGTERM at the guard's own death, the one case that the guard cannot see to.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _watch_owner() -> None:
    while os.read(0, 4096):
        continue
    os.kill(os.getpid(), OWNER_GONE)


def _end_group(group: int, grace_s: float) -> None:
    """Workers get up to two seconds after their server has ended, then SIGKILL, which is not waited for."""
    deadline = time.monotonic() + min(grace_s, 2.0)
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    _signal_group(group, signal.SIGKILL)


def _signal_group(group: int, signal_number: int) -> bool:
    """False when the group has no process left."""
    try:
        os.killpg(group, signal_number)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
