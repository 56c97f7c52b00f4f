"""What the tokens of a language model stand for, for programs that read and write text."""

from dataclasses import dataclass

from loopfold.text.vocabulary import Vocabulary, Words


@dataclass(frozen=True)
class Texts:
    """The tokens of a vocabulary as bytes of UTF-8."""

    unit: str
    tokens: tuple[bytes, ...]
    unknown: int | None
    unspaced: bool = False  # of words: whether a character of a script without spaces is one by itself

    @property
    def size(self) -> int:
        return len(self.tokens)

    @staticmethod
    def of(vocabulary: Vocabulary) -> "Texts":
        table = [entry.encode() if isinstance(entry, str) else bytes(entry) for entry in vocabulary._table]
        unspaced = isinstance(vocabulary, Words) and vocabulary._unspaced
        return Texts(vocabulary.unit, tuple(table), vocabulary.unknown, unspaced)
