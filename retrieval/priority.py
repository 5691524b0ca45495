"""Background work that steps back for requests."""

import os
import sys
import threading


def lower_priority(nice: int) -> None:
    """Of the calling thread, by `nice` steps (0 to 19).

    On Linux a thread has a priority of its own; elsewhere this would slow the whole process, and does nothing.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
