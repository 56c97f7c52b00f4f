"""How much memory is free, for those who can say beforehand that they need more: to be told is better than killed."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from loopfold.errors import OptionError

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # of a container


def free_memory(device: str = "cpu") -> int | None:
    """The bytes that could be had now, swap included; None where the system does not tell."""
    if device.startswith("cuda"):
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    with suppress(OSError, KeyError, ValueError):
        found = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = sum(1024 * int(found[name].split()[0]) for name in ("MemAvailable", "SwapFree"))
        return min([free, *filter(None, map(_limit, _LIMITS))])
    with suppress(AttributeError, OSError, ValueError):  # not Linux: all that there is
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _limit(path: str) -> int | None:
    with suppress(OSError, ValueError):  # there is none, or it is "max"
        return int(Path(path).read_text())
    return None


def check_memory(what: str, needed: int, device: str, *advice: object) -> None:
    """Refuse what needs more bytes than there are; `advice` is what to do."""
    free = free_memory(device)
    if free is not None and needed > free:
        short = f"needs at least {needed / 1e9:,.1f} GB of memory, and {free / 1e9:,.1f} GB are free: "
        raise OptionError(f"{what} {short}", *advice, ".")
