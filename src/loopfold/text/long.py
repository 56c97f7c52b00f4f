"""Text that is too long for a `str`: it lies in a file and is read in pieces. Short text is a `str`, as everywhere."""

import codecs
import io
import logging
import tempfile
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import IO, Any
from weakref import finalize

from loopfold.files import cache_folder
from loopfold.telling import tell

LARGE = 1 << 25  # bytes of UTF-8 from which on a text is long
CHUNK = 1 << 18  # characters or bytes that are read at a time
LINES = 1 << 16  # characters, at least, of a piece of whole lines

_log = logging.getLogger("loopfold")


class LongText:
    """A stretch of a text in a file of our own. `len` counts characters, and `text[a:b]` is a `str`.

    It is a copy of what was read, decoded and with line ends as `\\n`; it has no name and is gone with this process.
    """

    def __init__(self, kept: "_Kept", start: int, end: int) -> None:
        self._kept, self._start, self._end = kept, start, end
        self._first, self._last = kept.byte_at(start), kept.byte_at(end)

    def __len__(self) -> int:
        return self._end - self._start

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LongText) and (self.size, self.sha256) == (other.size, other.sha256)

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __getitem__(self, places: slice) -> str:
        start, end, step = places.indices(len(self)) if isinstance(places, slice) else (0, 0, None)
        if step != 1:
            raise TypeError(f"a text of {self.size / 1e6:,.0f} MB is no str: cut what you need, as in text[:1000].")
        first, last = (self._kept.byte_at(self._start + place) for place in (start, max(start, end)))
        return self._kept.read(first, last).decode()

    def part(self, start: int, end: int) -> "Text":
        """The characters from `start` up to `end`; a `str` if that is short."""
        part = LongText(self._kept, self._start + start, self._start + end)
        return part if part.size >= LARGE else part[:]

    @property
    def size(self) -> int:
        """How many bytes it has in UTF-8."""
        return self._last - self._first

    def encode(self) -> bytes:
        """All of it in UTF-8, in memory."""
        return self._kept.read(self._first, self._last)

    def utf8(self) -> Iterator[bytes]:
        """The same in pieces, which may tear a character."""
        for start in range(self._first, self._last, CHUNK):
            yield self._kept.read(start, min(start + CHUNK, self._last))

    @cached_property
    def sha256(self) -> str:
        digest = sha256()
        for piece in self.utf8():
            digest.update(piece)
        return digest.hexdigest()


Text = str | LongText
Read = str | Any  # the same, of text that was read: who knows that theirs is short may do with it what a `str` can do


class _Kept:
    """A file of UTF-8, and where in it the pieces begin that it was written in: counted in characters, in bytes."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.lock = file, Lock()
        finalize(self, file.close)
        self.characters, self.bytes = [0], [0]

    def write(self, length: int, utf8: bytes) -> None:
        """One more piece, of `length` characters."""
        try:
            self._write(utf8)
        except OSError as error:  # the disk is full
            _log.warning("a long text is kept in memory, since its file cannot be written: %s", error)
            full, self.file = self.file, io.BytesIO(self.read(0, self.bytes[-1]))
            full.close()  # it has no name: its space is free again
            self._write(utf8)
        self.characters.append(self.characters[-1] + length)
        self.bytes.append(self.bytes[-1] + len(utf8))

    def _write(self, utf8: bytes) -> None:
        self.file.seek(self.bytes[-1])
        left = memoryview(utf8)
        while left:  # a file without a buffer may take less than it is given
            left = left[self.file.write(left) :]

    def read(self, first: int, last: int) -> bytes:
        pieces = []
        with self.lock:
            self.file.seek(first)
            while first < last and (piece := self.file.read(last - first)):
                pieces.append(piece)
                first += len(piece)
        return b"".join(pieces)

    def byte_at(self, character: int) -> int:
        """Where a character begins."""
        i = bisect_right(self.characters, character) - 1
        if self.characters[i] == character:
            return self.bytes[i]
        piece = self.read(self.bytes[i], self.bytes[i + 1]).decode()
        return self.bytes[i] + len(piece[: character - self.characters[i]].encode())


class Gathering:
    """Takes a text piece by piece, and keeps it in memory or, once it is long, in a file."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._kept: _Kept | None = None
        self._size, self._last = 0, ""

    def add(self, piece: str) -> None:
        for cut in cuts(piece):
            utf8 = cut.encode()
            self._size += len(utf8)
            if self._kept is not None:
                self._kept.write(len(cut), utf8)
                continue
            self._pieces.append(cut)
            if self._size >= LARGE:
                self._kept, pieces, self._pieces = _Kept(unnamed_file()), self._pieces, []
                for held in pieces:
                    self._kept.write(len(held), held.encode())
        self._last = piece[-1:] or self._last

    def end_line(self) -> None:
        """What comes next begins on a line of its own."""
        if self._last not in ("", "\n"):
            self.add("\n")

    def text(self) -> Text:
        if self._kept is None:
            return "".join(self._pieces)
        return LongText(self._kept, 0, self._kept.characters[-1])


def unnamed_file() -> IO[bytes]:
    """A file without a name, in the cache folder, or where temporary files go; in memory if nothing can be written."""
    for place in (cache_folder, lambda: Path(tempfile.gettempdir())):
        try:
            folder = place()
            folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(buffering=0, dir=folder)
        except (OSError, RuntimeError) as error:  # read-only, or there is no home
            reason = error
    _log.warning("a long text is kept in memory, since no file can be written: %s", reason)
    return io.BytesIO()


# ------------------------------------------------------------------ either kind of text, in pieces


def size_of(text: Text) -> int:
    """How many bytes a text has in UTF-8."""
    return text.size if isinstance(text, LongText) else len(text.encode())


def utf8_of(text: Text) -> Iterator[bytes]:
    """A text in UTF-8, in pieces that may tear a character."""
    return text.utf8() if isinstance(text, LongText) else (cut.encode() for cut in cuts(text))


def cuts(text: Text, doing: str = "") -> Iterator[str]:
    """A text in pieces of any length; `doing` says what for, where that takes long."""
    if isinstance(text, str):
        for start in range(0, len(text), CHUNK):
            yield text[start : start + CHUNK]
        return
    decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
    for utf8 in text.utf8():
        yield decoder.decode(utf8)
        done += len(utf8)
        tell(doing, done, text.size)


def lines(text: Text, doing: str = "") -> Iterator[str]:
    """A text in pieces of about 64 thousand characters, each of whole lines."""
    held: list[str] = []  # a line may be longer than any piece that is read
    length = 0
    for piece in cuts(text, doing):
        start = 0
        while (end := piece.find("\n", start + max(LINES - length, 0)) + 1) > 0:
            yield "".join([*held, piece[start:end]])
            held, length, start = [], 0, end
        held.append(piece[start:])
        length += len(piece) - start
    if length:
        yield "".join(held)
