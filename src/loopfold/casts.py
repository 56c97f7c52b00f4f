"""torch.autocast, as it is around a call: what it was told, without it, and with it again at another place."""

import functools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

Casts = tuple[tuple[str, torch.dtype], ...]  # the kinds of devices that autocast is on for, and the dtype of each


def casts(device: torch.device) -> Casts:
    """What autocast does now, to operations on a device and on the CPU.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     casts(torch.device("cpu"))
    (('cpu', torch.bfloat16),)
    """
    if not torch._C._is_any_autocast_enabled():  # as is usual, and asked at every call
        return ()
    on = [kind for kind in _kinds(device.type) if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in on)


@contextmanager
def with_casts(wanted: Casts, device: torch.device) -> Iterator[None]:
    """While open, autocast does this and nothing else, for a device and the CPU; `()`: it is off.

    Each cast is made anew. Those that autocast keeps for later have a gradient or none as gradients were on or off
    when they were made, which is nothing that a call on the side may decide.
    """
    if not wanted and not casts(device):
        yield
        return
    with ExitStack() as stack:
        for kind in _kinds(device.type):
            dtype = dict(wanted).get(kind)
            stack.enter_context(torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False))
        yield


@functools.cache
def _kinds(kind: str) -> list[str]:
    return [k for k in dict.fromkeys(("cpu", kind)) if torch.amp.is_autocast_available(k)]
