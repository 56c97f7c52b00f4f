"""What the tokens of a text are: characters, bytes, words or subwords, and their numbers."""

import codecs
import json
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cached_property
from hashlib import sha256
from importlib.metadata import version
from itertools import islice, pairwise
from types import ModuleType
from typing import Any, ClassVar
from unicodedata import unidata_version

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from loopfold.errors import Argument, OptionError, Spelt
from loopfold.states import whole_number
from loopfold.text.long import Text, cuts, lines
from loopfold.text.tokens import Encoded, Tokens, in_file, in_memory, smallest

__all__ = ["Bytes", "Characters", "OfBytes", "Subwords", "Tokens", "Vocabulary", "Words", "vocabulary_from_json"]
_LEARNING, _ENCODING = "learning the vocabulary", "encoding the text"
_AT_A_TIME = 64  # pieces that are encoded side by side


@dataclass(frozen=True)
class Vocabulary(ABC):
    """The tokens that a model knows; each has a number from 0 to `size` - 1. `of` learns them from training text."""

    unit: ClassVar[str]
    unknown: ClassVar[int | None] = None  # the id of <unk>; None where nothing can be unknown
    reads_unknown: ClassVar[bool] = False  # whether a model learns what follows <unk>, so that it may read it
    end: ClassVar[int | None] = None  # the id of <eos>, the end of a line
    library: ClassVar[str | None] = None  # what encodes, where that is not our own

    def encode(self, text: Text) -> Tokens:
        """The tokens of a text; of a long one they are in a file that is made once."""
        if isinstance(text, str):
            return in_memory(self.unit, self._encoded(text))
        made_by = json.dumps(self.as_json()), version(self.library) if self.library else "", unidata_version, "1"
        name = sha256("\n".join([text.sha256, *made_by]).encode()).hexdigest()
        return in_file(name, self.unit, self.size, lambda: self._encoded(text))

    @abstractmethod
    def _encoded(self, text: Text) -> Iterator[Encoded]:
        """The same piece by piece."""

    def beginning(self, text: str) -> Tensor:
        """The tokens of a text that goes on `[n]`: a line that is not at its end yet has no `<eos>`."""
        ids = self.encode(text).ids
        return ids[:-1] if self.end is not None and text and not text.endswith("\n") else ids

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of some tokens."""

    def token(self, number: int) -> str:
        """One token by itself, so that it can be read."""
        entry = self._entry(number)
        return entry if isinstance(entry, str) else entry.decode(errors="backslashreplace")

    @abstractmethod
    def stream(self) -> Callable[[int], str]:
        """A function that takes the next id and returns the text that can be printed now, "" where more must come."""

    @abstractmethod
    def unknown_in(self, text: str) -> list[str]:
        """What in a text is unknown, each thing once, in order of first appearance."""

    @property
    @abstractmethod
    def _table(self) -> Sequence[Any]:
        """What each id stands for, as text or as bytes."""

    @property
    def size(self) -> int:
        """How many tokens there are."""
        return len(self._table)

    def as_json(self) -> dict[str, Any]:
        """What `vocabulary_from_json` needs to build this vocabulary again."""
        return {"kind": type(self).__name__.lower(), **asdict(self)}

    def _entry(self, number: int) -> Any:
        if not 0 <= number < self.size:
            raise ValueError(f"ids of this vocabulary run from 0 to {self.size - 1}; got {number}.")
        return self._table[number]


def vocabulary_from_json(data: dict[str, Any]) -> Vocabulary:
    """The vocabulary whose `as_json` gave this.

    >>> vocabulary_from_json({"kind": "characters", "symbols": "abc"}).size
    4
    """
    match data:
        case {"kind": "characters", "symbols": str(symbols)}:
            return Characters(symbols)
        case {"kind": "bytes"}:
            return Bytes()
        case {"kind": "words", "words": [*words]} if all(isinstance(word, str) for word in words):
            return Words(tuple(words))
        case {"kind": "subwords", "model": str(model)}:
            return Subwords(model).checked()
    raise ValueError(
        f"no vocabulary is of kind {data.get('kind')!r} with the fields {sorted(set(data) - {'kind'})}; the kinds are "
        f"characters (with symbols), bytes, words (with words) and subwords (with model)."
    )


# ------------------------------------------------------------------ characters


@dataclass(frozen=True)
class Characters(Vocabulary):
    """Every character of the training text; id 0 stands for all others and is printed as `\N{REPLACEMENT CHARACTER}`.

    >>> vocabulary = Characters.of("abba")
    >>> vocabulary.encode("bac").ids.tolist(), vocabulary.unknown_in("bac"), vocabulary.size
    ([2, 1, 0], ['c'], 3)
    """

    symbols: str  # in the order of their ids, from 1 on
    unit: ClassVar[str] = "character"
    unknown: ClassVar[int | None] = 0

    @classmethod
    def of(cls, text: Text) -> "Characters":
        seen = np.zeros(0x110000, dtype=bool)  # one place for every character of Unicode
        for piece in cuts(text, _LEARNING):
            seen[_codes(piece)] = True
        return cls("".join(map(chr, np.flatnonzero(seen).tolist())))

    @cached_property
    def _table(self) -> str:
        return "\N{REPLACEMENT CHARACTER}" + self.symbols

    def _encoded(self, text: Text) -> Iterator[Encoded]:
        id_of = np.zeros(0x110000, smallest(self.size))
        id_of[_codes(self.symbols)] = np.arange(1, self.size)
        for piece in cuts(text, _ENCODING):
            ids = id_of.take(_codes(piece))
            yield Encoded(ids, len(piece), len(piece.encode()), int((ids == 0).sum()))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self._entry, ids))

    def stream(self) -> Callable[[int], str]:
        return self._entry

    def unknown_in(self, text: str) -> list[str]:
        return [symbol for symbol in dict.fromkeys(text) if symbol not in self.symbols]


def _codes(text: str) -> NDArray[Any]:
    if text.isascii():
        return np.frombuffer(text.encode(), dtype=np.uint8)
    return np.frombuffer(text.encode("utf-32-le"), dtype="<u4")


# ------------------------------------------------------------------ words

# Scripts written without spaces: Thai and Lao, Myanmar, Khmer, then Han and Kana with their punctuation, compatibility
# and full-width forms, and the extensions. U+3000 is missing since it is white space; Hangul, since Korean has spaces.
UNSPACED = (
    "\u0e01-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fff\u3001-\u312f\u3190-\u9fff\uf900-\ufaff"
    "\uff01-\uff9f\uffe0-\uffee\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_ALONE = re.compile(f"[{UNSPACED}]")
_EOS = re.compile(r" <eos>(?!\S)")
_UNKNOWN = re.compile(r"(?<!\S)<unk>(?!\S)")
_WORD = re.compile(rf"[{UNSPACED}]|[^\s{UNSPACED}]+")


@dataclass(frozen=True)
class Words(Vocabulary):
    """What stands between white space; in scripts without spaces, such as Chinese, each character is a word.

    Every line ends in `<eos>`. Words that are not in the list are unknown and become `<unk>`. A text that has the word
    `<unk>` itself, as Penn Treebank and WikiText do, is in words already, so there only white space parts them. White
    space counts as one character, whatever its length: no word carries more.

    >>> vocabulary = Words.of("to be or not to be")
    >>> vocabulary.words, vocabulary.encode("to err").ids.tolist()
    (('be', 'to'), [3, 0, 1])
    """

    words: tuple[str, ...] = field(repr=False)  # in the order of their ids, from 2 on
    unit: ClassVar[str] = "word"
    unknown: ClassVar[int | None] = 0
    reads_unknown: ClassVar[bool] = True
    end: ClassVar[int | None] = 1

    @classmethod
    def of(cls, text: Text, min_count: int | None = None, max_size: int | None = None) -> "Words":
        """The words that occur at least `min_count` times, the most frequent first, up to `size == max_size`.

        Without `min_count` it is 2, so that `<unk>` occurs and the model learns what comes after it; but 1 if the text
        has the word `<unk>`, since its rare words have then been replaced already.
        """
        if max_size is not None and whole_number("Words", "max_size", max_size) < 3:
            needs = Spelt("Words needs max_size", ("words need ", Argument("vocabulary_size")))
            raise OptionError(needs, f" of 3 or more, for <unk>, <eos> and a word; got {max_size}.")
        closed = any("<unk>" in piece and _UNKNOWN.search(piece) for piece in lines(text))
        least = (1 if closed else 2) if min_count is None else whole_number("Words", "min_count", min_count)
        counts: Counter[str] = Counter()
        for words in _words(text, not closed, _LEARNING):
            counts.update(words)
        kept = sorted((w for w, n in counts.items() if n >= least), key=lambda w: (-counts[w], w))
        kept = [word for word in kept if word not in ("<unk>", "<eos>")]
        return cls(tuple(kept if max_size is None else kept[: max_size - 2]))

    @cached_property
    def _table(self) -> tuple[str, ...]:
        return ("<unk>", "\n", *self.words)

    @cached_property
    def _id_of(self) -> dict[str, int]:
        return {"<unk>": 0, "<eos>": 1} | {word: i for i, word in enumerate(self.words, start=2)}

    @cached_property
    def _unspaced(self) -> bool:
        """Whether characters of scripts without spaces are words: so it is unless a longer word has one."""
        return not any(len(word) > 1 and _ALONE.search(word) for word in self.words)

    def _encoded(self, text: Text) -> Iterator[Encoded]:
        id_of = self._id_of
        for words in _words(text, self._unspaced, _ENCODING):
            ids = np.array([id_of.get(word, -1) for word in words])
            spelt = _spelt(words, self._unspaced)
            yield Encoded(ids.clip(0), len(spelt), len(spelt.encode()), int((ids < 0).sum()))

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self.stream(), ids))

    def stream(self) -> Callable[[int], str]:
        before = "\n"

        def next_text(number: int) -> str:
            nonlocal before
            word: str = self._entry(number)
            between = _between(before, word, self._unspaced)
            before = word
            return between + word

        return next_text

    def unknown_in(self, text: str) -> list[str]:
        lists = _words(text, self._unspaced, "")
        return [*dict.fromkeys(word for words in lists for word in words if word not in self._id_of)]


def _words(text: Text, unspaced: bool, doing: str) -> Iterator[list[str]]:
    for piece in lines(text, doing):
        marked = (piece if piece.endswith("\n") else piece + "\n").replace("\n", " <eos> ")
        yield _WORD.findall(marked) if unspaced and not piece.isascii() else marked.split()


def _spelt(words: list[str], unspaced: bool) -> str:
    """The text that the words of some lines stand for.

    >>> _spelt(["to", "be", "<eos>", "<eos>", "or", "<eos>"], unspaced=True)
    'to be\\n\\nor\\n'
    """
    if unspaced and not all(map(str.isascii, words)):
        words = ["\n" if word == "<eos>" else word for word in words]
        return "".join(_between(a, b, unspaced) + b for a, b in pairwise(["\n", *words]))
    return _EOS.sub("\n", " ".join(["", *words])).replace("\n ", "\n").removeprefix(" ")


def _between(a: str, b: str, unspaced: bool) -> str:
    return "" if "\n" in (a, b) or (unspaced and _tight(a, b)) else " "


def _tight(a: str, b: str) -> bool:
    """Whether no space goes between two words: one is of a script without spaces, the other too or punctuation."""
    alone = [_ALONE.match(word) is not None for word in (a, b)]
    return any(alone) and all(lone or not any(map(str.isalnum, word)) for lone, word in zip(alone, (a, b), strict=True))


# ------------------------------------------------------------------ bytes, and sequences of them


@dataclass(frozen=True)
class OfBytes(Vocabulary):
    """Tokens that are bytes of UTF-8, one or more: nothing is unknown, and a character may be several tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._entry, ids)).decode(errors="replace")

    def stream(self) -> Callable[[int], str]:
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        return lambda number: decoder.decode(self._entry(number))

    def unknown_in(self, text: str) -> list[str]:
        return []


@dataclass(frozen=True)
class Bytes(OfBytes):
    """The 256 bytes; there is nothing to learn.

    >>> Bytes().encode("é").ids.tolist()
    [195, 169]
    >>> [*map(Bytes().stream(), [195, 169])]
    ['', 'é']
    """

    unit: ClassVar[str] = "byte"

    @classmethod
    def of(cls, text: Text) -> "Bytes":
        return cls()

    @cached_property
    def _table(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)]

    def _encoded(self, text: Text) -> Iterator[Encoded]:
        for piece in cuts(text, _ENCODING):
            ids = np.frombuffer(piece.encode(), dtype=np.uint8)
            yield Encoded(ids, len(piece), len(ids), 0)


MOST_SUBWORDS = 1 << 24  # the library makes room for all of them at once, and aborts where that is not there
_THOUSAND = re.compile(r"(?s).{1,1000}(?=\s)|.{1,1000}")


@dataclass(frozen=True)
class Subwords(OfBytes):
    """Byte-pair encoding: sequences of bytes that are frequent in the training text are one token.

    >>> vocabulary = Subwords.of("the thin thing then. " * 9, size=260)
    >>> len(vocabulary.encode("thing")), vocabulary.decode(vocabulary.encode("日本 thing").ids.tolist())
    (3, '日本 thing')
    """

    model: str = field(repr=False)  # as the tokenizers library writes it
    unit: ClassVar[str] = "subword"
    library: ClassVar[str | None] = "tokenizers"

    @classmethod
    def of(cls, text: Text, size: int = 2000) -> "Subwords":
        if whole_number("Subwords", "size", size) < 256 or size > MOST_SUBWORDS:
            needs = Spelt("Subwords needs a size", ("subwords need ", Argument("vocabulary_size")))
            raise OptionError(
                needs, f" of 256 or more, since every byte is a token, and at most {MOST_SUBWORDS}; got {size}."
            )
        library = _library()
        tokenizer = cls._cutting(library.models.BPE())
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
        # The time to learn from a word grows with the square of its length, and a line of DNA is one word: cut at 1000.
        parts = (part[0] for piece in lines(text, _LEARNING) for part in _THOUSAND.finditer(piece))
        tokenizer.train_from_iterator(parts, trainer)
        return cls(tokenizer.to_str())

    @staticmethod
    def _cutting(model: Any) -> Any:
        """A tokenizer over a model of byte pairs."""
        library = _library()
        # No token goes on after a newline, so that a text may be cut there and its parts encoded side by side.
        lines = library.pre_tokenizers.Split("\n", "merged_with_previous")
        byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = library.Tokenizer(model)
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence([lines, byte_level])
        return tokenizer

    def checked(self) -> "Subwords":
        """This vocabulary, if it is whole; else ValueError."""
        try:
            ids = sorted(self._pairs["vocab"].values())
            whole = ids == [*range(self.size)] and self._tokenizer.get_vocab_size() == self.size
        except Exception as error:  # the library has its own
            raise ValueError(f"its subwords cannot be read ({type(error).__name__}: {error})") from error
        if not whole:
            raise ValueError("its subwords are not numbered from 0 on")
        return self

    @cached_property
    def _pairs(self) -> dict[str, Any]:
        """The tokens and their merges. Whatever else the library would read from its file is left alone."""
        return json.loads(self.model)["model"]

    @cached_property
    def _tokenizer(self) -> Any:
        merges = [tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in self._pairs["merges"]]
        return self._cutting(_library().models.BPE(self._pairs["vocab"], merges))

    @cached_property
    def _table(self) -> list[bytes]:
        # The library writes a byte as a letter: itself where it can be printed, else one from U+0100 on, in order.
        plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in plain]
        byte_of = {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
        id_of: dict[str, int] = self._pairs["vocab"]
        return [bytes(byte_of[letter] for letter in token) for token in sorted(id_of, key=id_of.__getitem__)]

    def _encoded(self, text: Text) -> Iterator[Encoded]:
        def encoded(piece: str) -> Encoded:
            ids = np.array(tokenizer.encode_batch_fast([piece])[0].ids, dtype=np.int64)
            return Encoded(ids, len(piece), len(piece.encode()), 0)

        tokenizer, pieces = self._tokenizer, lines(text, _ENCODING)
        with ThreadPoolExecutor() as pool:  # the library lets go of Python's lock
            while some := [*islice(pieces, _AT_A_TIME)]:
                yield from pool.map(encoded, some)


def _library() -> ModuleType:
    # The library's own threads would not survive a fork, and it prints a warning then.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers

    return tokenizers
