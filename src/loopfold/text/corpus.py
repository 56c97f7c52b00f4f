"""Reads text from files, folders or standard input, and splits it into training, validation and test text."""

import codecs
import io
import math
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from functools import cache
from hashlib import sha256
from importlib import import_module
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import IO, TextIO

from loopfold.errors import Mendable
from loopfold.telling import tell
from loopfold.text.long import LARGE, Gathering, Read, Text, size_of, utf8_of

PYTHON_DOCS = "python-docs"
LEAST = 100  # characters of training text
_READ = 1 << 18  # bytes at a time
_STDIN = "standard input"
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}  # by which module of Python; some builds lack the last two
# what files begin with that are no text, and are not to be converted by iconv
_NO_TEXT = {
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive, as .docx and .epub are",
    b"\x89PNG": "a picture",
    b"\xff\xd8\xff": "a picture",
    b"GIF8": "a picture",
    b"\x1f\x8b": "compressed by gzip, which a name that ends in .gz would tell",
    b"BZh": "compressed by bzip2, which a name that ends in .bz2 would tell",
    b"\xfd7zXZ": "compressed by xz, which a name that ends in .xz would tell",
    b"\x7fELF": "a program",
}


class CorpusError(Mendable, ValueError):
    """Text that cannot be used; the message says why, and what to do."""


@dataclass(frozen=True)
class Corpus:
    """Text to learn from, to choose by and to report on; `sha256` tells two corpora, or two splits of one, apart.

    A part of 32 MiB or more lies in a file and not in memory. It has a `len`, and `corpus.train[a:b]` is a `str`.

    >>> Corpus("rhyme", "one, ", "two", "").sha256 == Corpus("rhyme", "one", ", two", "").sha256
    False
    """

    name: str
    train: Read = field(repr=False)
    valid: Read = field(repr=False)
    test: Read = field(repr=False)
    sha256: str = field(init=False)

    def __post_init__(self) -> None:
        digest = sha256()
        for part in (self.train, self.valid, self.test):
            digest.update(b"%d\n" % size_of(part))  # so that moving the split changes it
            for utf8 in utf8_of(part):
                digest.update(utf8)
        object.__setattr__(self, "sha256", digest.hexdigest())

    @property
    def part(self) -> str:
        """The part to score a model on where none is named: test, or valid where there is no test text."""
        return "test" if self.test else "valid"


def read_corpus(
    sources: Sequence[str], split: Sequence[float] = (90, 5, 5), valid: str | None = None, test: str | None = None
) -> Corpus:
    """The text of `sources`, one after the other, split by `split` or whole where `valid` or `test` are given.

    A source is a file, a folder (all `*.txt` in it), `-` for standard input, or `python-docs`; `./python-docs` is a
    file of that name. Files may be compressed, as `*.txt.gz`, `.bz2` or `.xz`. `split` holds the shares of training,
    validation and test text.

    >>> corpus = read_corpus(["python-docs"], split=(8, 1, 1))
    >>> 7 < len(corpus.train) / len(corpus.test) < 9
    True
    """
    sources = [sources] if isinstance(sources, str) else [*sources]
    _check_names([*sources, *(name for name in (valid, test) if name is not None)])
    text = read_text(sources)
    if valid is None and test is None:
        parts = _split(text, split)
    else:
        parts = text, "" if valid is None else read_text([valid]), "" if test is None else read_text([test])
    if len(parts[0]) < LEAST:
        raise CorpusError(
            f"the training text has {len(parts[0])} characters and needs at least {LEAST}: name more text, or type "
            f"{PYTHON_DOCS} to try without a file."
        )
    names = [{"-": _STDIN}.get(source) or Path(source).name or Path(source).resolve().name for source in sources]
    return Corpus(" + ".join(names) if len(names) < 4 else f"{names[0]} + {len(names) - 1} more", *parts)


def read_text(sources: Sequence[str]) -> Read:
    """The text of `sources` as one, not split."""
    _check_names(sources)
    gathered = Gathering()
    for source in sources:
        _read(source, gathered)
    return gathered.text()


def standard_input() -> str:
    """What is piped in, as text; it may be empty."""
    return "".join(_decode(iter([_read_stdin(sys.stdin)]), _STDIN))


def _check_names(sources: Sequence[str]) -> None:
    if not sources or "" in sources:
        raise CorpusError(f"no text was named: name a file, a folder, - for {_STDIN}, or {PYTHON_DOCS}.")
    for source in sources:
        if "\0" in source:  # as no file has, but a run that someone else made may say
            raise CorpusError(f"{source!r} is not the name of a file: name a text file.")
    if sources.count("-") > 1:
        raise CorpusError(f"- stands for {_STDIN}, which can be read only once: save it to a file and name that.")


def python_docs() -> str:
    """What `help("topics")` offers: some 370,000 characters that come with every CPython, a little new in each.

    Topics repeat each other's paragraphs. Each is kept once, so that no test text was in the training text already.

    >>> "assert statement" in python_docs()
    True
    """
    from pydoc_data.topics import topics

    paragraphs = (part for key in sorted(topics) for part in topics[key].split("\n\n") if part.strip())
    return "\n\n".join({" ".join(part.split()): part for part in paragraphs}.values()) + "\n"


def _split(text: Text, shares: Sequence[float]) -> tuple[Read, Read, Read]:
    """Three parts in order; a cut moves on to the next line start if that is near, so that no line is torn in two."""
    if len(shares) != 3 or not math.isfinite(sum(shares)) or min(shares) < 0 or shares[0] == 0:
        raise CorpusError(
            f"the split is {', '.join(map(str, shares))}; it needs three shares for training, validation and test, "
            f"none below 0 and the first above 0, such as 90, 5, 5."
        )
    exact = [Fraction(str(share)) for share in shares]  # 90, 5, 5 and 0.9, 0.05, 0.05 must cut at the same place
    exact = [share / sum(exact) for share in exact]
    # Half the smallest share at most, so that a moved cut leaves something of every part.
    near = len(text) * min(Fraction(1, 100), min(filter(None, exact)) / 2)

    def cut(share: Fraction) -> int:
        plain = round(len(text) * share)
        begin = max(plain - 1, 0)
        return max(plain, begin + text[begin : plain + math.floor(near)].find("\n") + 1)

    def within(start: int, end: int) -> Text:
        return text[start:end] if isinstance(text, str) else text.part(start, end)

    first, second = cut(exact[0]), cut(exact[0] + exact[1])
    parts = within(0, first), within(first, second), within(second, len(text))
    for name, part, share in zip(("training", "valid", "test"), parts, exact, strict=True):
        if share and not part:
            raise CorpusError(
                f"the {name} text is empty: {float(share):.3g} of {len(text)} characters is none. Name more text, or "
                f"give it no share, or a larger one."
            )
    return parts


# ------------------------------------------------------------------ one source


def _read(source: str, into: Gathering) -> None:
    into.end_line()
    if source == PYTHON_DOCS:
        into.add(python_docs())
        return
    path, name, empty = Path(source), _STDIN if source == "-" else source, "is empty"
    try:
        if source == "-":
            files = {_STDIN: iter([_read_stdin(sys.stdin)])}
        else:
            files = {str(file): _bytes(file) for file in (_files(path) if path.is_dir() else [path])}
        for file, raw in files.items():
            into.end_line()
            for piece in _decode(raw, file):
                if empty and piece:
                    empty = "" if piece.strip() else "has white space alone"
                into.add(piece)
    except (FileNotFoundError, NotADirectoryError):
        raise CorpusError(_missing(path)) from None
    except OSError as error:
        name = str(error.filename or name)
        raise CorpusError(
            f"{name} cannot be read ({error.strerror}): type ls -l {quote(name)} to see why, or name another file."
        ) from None
    if empty:
        raise CorpusError(f"{name} {empty}: name a file with text, or type {PYTHON_DOCS} to try without one.")


@cache
def _read_stdin(stream: TextIO) -> bytes:
    """All of it; the second call gives the same as the first."""
    if stream.isatty():
        raise CorpusError(f"{_STDIN} is the keyboard: pipe a text in, as in cat text.txt | loopfold ...")
    return stream.buffer.read()


def _bytes(file: Path) -> Iterator[bytes]:
    """What a file holds, decompressed; or what comes out of a pipe, as <(…) of a shell is."""
    about = os.stat(file)
    kind, size = about.st_mode, about.st_size
    if not (stat.S_ISREG(kind) or stat.S_ISFIFO(kind) or os.path.samefile(file, os.devnull)):
        raise CorpusError(f"{file} is a device or a socket, and its end may never come: name a file with text.")
    module = _COMPRESSED.get(file.suffix.lower())
    with file.open("rb") if size >= LARGE else io.BytesIO(file.read_bytes()) as opened:
        for piece in _pieces(opened) if module is None else _decompressed(file, opened, module):
            yield piece
            if size >= LARGE:
                tell(f"reading {file.name}", opened.tell(), size)


def _pieces(opened: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: opened.read(_READ), b"")


def _decompressed(file: Path, opened: IO[bytes], module: str) -> Iterator[bytes]:
    library = import_module(module)
    try:
        with library.open(opened) as unpacked:
            yield from _pieces(unpacked)
    except MemoryError:
        raise
    except Exception as error:  # each of them has its own
        raise CorpusError(
            f"{file} cannot be decompressed ({error}): it is damaged, or not what its name says. Get it again."
        ) from None


def is_there_once(source: str) -> bool:
    """Whether a source is a pipe or a device, which cannot be read a second time."""
    return os.path.exists(source) and not (os.path.isfile(source) or os.path.isdir(source))


def _files(folder: Path) -> list[Path]:
    below: list[Path] = []
    for place, folders, names in os.walk(folder, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below += [Path(place, name) for name in names if not name.startswith(".")]
    files = sorted(p for p in below if p.is_file())  # not a pipe, which would have to be waited for
    texts = [p for p in files if p.suffix.lower() == ".txt" or _is_compressed_text(p)]
    if not files:
        raise CorpusError(f"the folder {folder} has no files: name a file with text, or another folder.")
    if not texts and (folder / "checkpoint.json").is_file():
        raise CorpusError(f"{folder} is the folder of a run and holds no text: name a file with text.")
    if not texts:
        common = [suffix for suffix, _ in Counter(p.suffix for p in files).most_common(5)]
        raise CorpusError(
            f"the folder {folder} has no .txt files, only {', '.join(s or 'names without a suffix' for s in common)}: "
            f"name the files, as in {quote(str(folder))}/*{common[0]}"
        )
    return texts


def _refuse(error: OSError) -> None:
    """A folder that cannot be looked into: half of a text is not the text."""
    raise error


def _is_compressed_text(path: Path) -> bool:
    return path.suffix.lower() in _COMPRESSED and Path(path.stem).suffix.lower() == ".txt"


def _decode(raw: Iterator[bytes], name: str) -> Iterator[str]:
    """The text of the bytes of one file, piece by piece: without a byte-order mark, and with plain line ends."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    begin, read, nul, held = b"", 0, -1, ""
    for piece in chain(raw, [b""]):
        begin = begin or piece[:8]
        try:
            read += len(piece)
            text = held + decoder.decode(piece, final=not piece)
        except UnicodeDecodeError as error:
            for _ in raw:  # to its end: a compressed file that is damaged says so there
                pass
            if kind := _kind(begin):
                raise CorpusError(f"{name} is not text: it is {kind}. Name a text file in UTF-8.") from None
            encoding = "utf-16" if begin[:2] in (b"\xff\xfe", b"\xfe\xff") else "latin1"
            old = "old.txt" if name == _STDIN else quote(name)
            place, byte = read - len(error.object) + error.start, error.object[error.start]
            raise CorpusError(
                f"{name} is not UTF-8: byte {place} is 0x{byte:02x}. If it is {encoding}, type "
                f"iconv -f {encoding} -t utf-8 {old} > new.txt and name new.txt."
            ) from None
        if nul < 0 and 0 in piece:
            nul = read - len(piece) + piece.index(0)
        if read == len(piece):
            text = text.removeprefix("\ufeff")
        held = "\r" if piece and text.endswith("\r") else ""  # half of a line end, perhaps
        text = text.removesuffix(held)
        yield text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text
    if nul >= 0:
        why = f"it is {kind}" if (kind := _kind(begin)) else f"byte {nul} is NUL"
        raise CorpusError(f"{name} is not text: {why}. Name a text file in UTF-8.")


def _kind(begin: bytes) -> str | None:
    """What a file is that begins so and is no text."""
    return next((kind for first, kind in _NO_TEXT.items() if begin.startswith(first)), None)


def _missing(path: Path) -> str:
    names = {PYTHON_DOCS} if path.parent == Path() else set()
    with suppress(OSError):
        names |= {*os.listdir(path.parent)} - {path.name}  # a link that leads nowhere has a name
    for close in get_close_matches(path.name, names, n=1):
        return f"there is no file {path}. Did you mean {path.with_name(close)}?"
    where = "" if path.parent.is_dir() else f" and no folder {path.parent}"
    return f"there is no file {path}{where}: name a text file, or type {PYTHON_DOCS} to try without one."
