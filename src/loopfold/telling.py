"""What takes long, while it does: those who work say how far they are, to whoever listens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Show = Callable[[str, int, int, str], None]
_shown: ContextVar[Show | None] = ContextVar("_shown", default=None)


@contextmanager
def telling(show: Show | None) -> Iterator[None]:
    """While open, `show(doing, done, of, unit)` is called on the way, and with None nothing is; `of` may be 0."""
    before = _shown.set(show)
    try:
        yield
    finally:
        _shown.reset(before)


@contextmanager
def telling_of(doing: str) -> Iterator[None]:
    """While open, whatever is told is told as this."""
    show = _shown.get()
    with telling(None if show is None else lambda _, *how_far: show(doing, *how_far)):
        yield


def tell(doing: str, done: int, of: int, unit: str = "bytes") -> None:
    """That so much of it is done, where somebody listens; nothing of what has no name."""
    show = _shown.get()
    if doing and show is not None:
        show(doing, done, of, unit)
