"""Shared by the benchmarks: how much memory a process has taken."""

from pathlib import Path


def largest() -> float:
    """The largest resident set so far, in MB, as Linux tells it. (Of `getrusage` a child inherits its parent's.)"""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
