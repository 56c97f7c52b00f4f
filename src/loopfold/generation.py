"""Generation: a language model's own tokens go back in. The state is carried, so every token costs the same."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn

from loopfold.evaluation import evaluating
from loopfold.feeding import Pick, Sample, noise_of
from loopfold.language.base import Context, LanguageModel, Next
from loopfold.language.recurrent import as_language_model
from loopfold.outputs import Classes
from loopfold.states import alive, map_state, whole_number
from loopfold.telling import tell
from loopfold.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Beam:
    """Search for a likely text as a whole: of all continuations, keep the `width` likeliest at each step."""

    width: int = 5

    def __post_init__(self) -> None:
        whole_number("Beam", "width", self.width)


class Text(NamedTuple):
    """A text that a model has written, without its prompt."""

    text: str
    ids: list[int]  # all tokens that were chosen; of a stop text too, which is not in `text`
    stopped: bool  # whether it ended at a stop text


@overload
def generate(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str = "",
    length: int = 200,
    pick: Pick | Beam = Sample(),
    show: Callable[[str], object] | None = None,
    *,
    stop: Sequence[str] = (),
) -> str: ...


@overload
def generate(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str = "",
    length: int = 200,
    pick: Pick | Beam = Sample(),
    show: Callable[[str], object] | None = None,
    *,
    samples: int,
    stop: Sequence[str] = (),
) -> str | list[str]: ...


def generate(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str = "",
    length: int = 200,
    pick: Pick | Beam = Sample(),
    show: Callable[[str], object] | None = None,
    *,
    samples: int = 1,
    stop: Sequence[str] = (),
) -> str | list[str]:
    """`length` more tokens after `prompt`, as text, without the prompt; or a list of `samples` such texts.

    `pick`     `Sample(generator, temperature, top_k, top_p)`, `Greedy()` or `Beam(width)`
    `show`     is called with each piece of text as soon as there is one: `lambda piece: print(piece, end="")`. Of
               several texts, with each text as soon as it is whole
    `samples`  how many texts, which are written side by side
    `stop`     texts that end what is written as soon as one of them is in it, and are left out of it

    What stands for unknown things is never generated. The loop of a recurrent model is compiled, and takes many tokens
    at a time; the same seed of the generator writes the same text.

    >>> from loopfold import Characters, Greedy, NGramLM
    >>> vocabulary = Characters.of("abcabcabc")
    >>> model = NGramLM(vocabulary.encode("abcabcabc").ids, vocabulary.size, order=3)
    >>> generate(model, vocabulary, "ab", length=5, pick=Greedy())
    'cabca'
    >>> generate(model, vocabulary, "ab", length=5, pick=Greedy(), samples=2)
    ['cabca', 'cabca']
    >>> generate(model, vocabulary, "ab", length=5, pick=Greedy(), stop=["bc"])
    'ca'
    """
    written = write(model, vocabulary, prompt, length, pick, show, samples, stop)
    return written[0].text if samples == 1 else [one.text for one in written]


def write(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str,
    length: int,
    pick: Pick | Beam,
    show: Callable[[str], object] | None,
    samples: int,
    stop: Sequence[str],
    as_unknown: bool = False,
) -> list[Text]:
    """The same as texts with their tokens. `as_unknown`: unknown words of the prompt are read as `<unk>`."""
    whole_number("generate", "length", length)
    whole_number("generate", "samples", samples)
    if isinstance(stop, str) or not all(stop):
        raise ValueError(f"stop is a list of texts, none of them empty; got {stop!r}.")
    if isinstance(pick, Beam) and samples > 1:
        raise ValueError(
            f"Beam finds one text, the likeliest; got samples={samples}. To draw many, type pick=Sample()."
        )
    model = as_language_model(model)
    unknown = [] if as_unknown and vocabulary.reads_unknown else vocabulary.unknown_in(prompt)
    if unknown:
        raise ValueError(
            f"the prompt holds what the model has never seen: {', '.join(map(repr, unknown[:5]))}"
            f"{', …' if len(unknown) > 5 else ''}. Leave it out."
        )
    texts = [_Writing(vocabulary.stream(), stop) for _ in range(samples)]
    with evaluating(model):
        ids = vocabulary.beginning(prompt)
        for text, token in itertools.product(texts, ids.tolist()):
            text.decode(token)
        context = _read(model, ids)
        if isinstance(pick, Beam):
            found: Iterable[list[int]] = (
                [token] for token in _search(model, context, length, pick.width, vocabulary.unknown)
            )
        else:
            first = MOST if show is None or samples > 1 else FIRST
            found = _draw(model, _repeated(context, samples), length, pick, vocabulary.unknown, first)
        for done, row in enumerate(found, start=1):
            for text, token in zip(texts, row, strict=True):
                piece = text.add(token)
                if samples == 1 and show is not None:
                    show(piece)
            stopped = all(text.stopped for text in texts)
            if samples > 1 or show is None:
                tell("writing", length if stopped else done, length, "tokens")
            if stopped:
                break
    rests = [text.end() for text in texts]
    written = [Text("".join(text.pieces), text.ids, text.stopped) for text in texts]
    if show is not None:
        for piece in filter(None, rests) if samples == 1 else [one.text for one in written]:
            show(piece)
    return written


def log_probabilities(model: nn.Module, vocabulary: Vocabulary, prompt: str, texts: Sequence[Text]) -> list[float]:
    """log P of all tokens of each text after the prompt, in nats, as the model has it: at temperature 1."""
    model = as_language_model(model)
    lengths = torch.tensor([len(text.ids) for text in texts])
    ids = torch.tensor([text.ids + [0] * (int(lengths.max()) - len(text.ids)) for text in texts]).T
    total = torch.zeros(len(texts), dtype=torch.float64)
    with evaluating(model):
        context = _repeated(_read(model, vocabulary.beginning(prompt)), len(texts))
        for start in range(0, len(ids), SCORED):
            tokens = ids[start : start + SCORED]
            scored = model(tokens.to(context.last.device), context)
            total -= torch.where(alive(tokens, lengths - start), scored.nll.double().cpu(), 0).sum(0)
            context = scored.context
    return total.tolist()


class _Writing:
    """A text that is being written. What may be the beginning of a stop text is held back until that is known."""

    def __init__(self, decode: Callable[[int], str], stop: Sequence[str]) -> None:
        self.decode, self.stop = decode, stop
        self.pieces: list[str] = []
        self.ids: list[int] = []
        self.held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is known to belong to it now; what comes after its end is nobody's."""
        if self.stopped:
            return ""
        self.ids.append(token)
        text = self.held + self.decode(token)
        found = [(at + len(stop), at) for stop in self.stop if (at := text.find(stop)) >= 0]
        if found:  # the one that is whole first; a token may hold more than one of them
            self.stopped = True
            return self._keep(text[: min(found)[1]], "")
        begun = [k for stop in self.stop for k in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:k])]
        known = len(text) - max(begun, default=0)
        return self._keep(text[:known], text[known:])

    def end(self) -> str:
        """No more will come: what was held back belongs to it."""
        return self._keep(self.held, "")

    def _keep(self, piece: str, held: str) -> str:
        self.pieces.append(piece)
        self.held = held
        return piece


def _read(model: LanguageModel, ids: Tensor) -> Context:
    context = model.initial_context(1)
    return model(ids[:, None].to(context.last.device), context).context if len(ids) else context


def _next(model: LanguageModel, context: Context, unknown: int | None) -> Next:
    """What may follow, without what stands for unknown things."""
    log_p, memory = model.next(context)
    if unknown is not None:
        log_p = log_p.index_fill(1, torch.tensor(unknown, device=log_p.device), -torch.inf)
    return Next(log_p, memory)


def _repeated(context: Context, times: int) -> Context:
    """The context of one text, for so many."""
    return context if times == 1 else map_state(lambda leaf: leaf.expand(times, *leaf.shape[1:]).contiguous(), context)


NO_CHOICE = "an output of the model is not a finite number, so no token can be chosen."
SCORED = 128  # tokens that are scored at a time
FIRST, MOST = 16, 2048  # tokens that are written at a time: few at first, where they are shown
ROOM = 1 << 22  # random numbers that are drawn at a time


def _draw(
    model: LanguageModel, context: Context, length: int, pick: Pick, unknown: int | None, first: int
) -> Iterator[list[int]]:
    """One row of tokens after the other: a token for each text."""
    outputs, like = Classes(model.vocabulary_size), context.last
    batch, done = len(like), 0
    most = max(1, min(MOST, ROOM // (batch * outputs.size)))
    in_blocks = type(model).write is not LanguageModel.write
    while done < length:
        block = min(max(first, 3 * done), most, length - done) if in_blocks else 1
        written = model.write(context, block, pick, _noise(pick, outputs, block, like), unknown)
        finite = written.best.isfinite().all(-1).tolist()
        for row, fine in zip(written.tokens.tolist(), finite, strict=True):
            if not fine:
                raise FloatingPointError(NO_CHOICE)
            yield row
        context, done = written.context, done + block


def _noise(pick: Pick, outputs: Classes, steps: int, like: Tensor) -> Tensor | None:
    """The random numbers of so many steps for a batch like this: the same, however many are drawn at a time."""
    one = like.new_empty((), dtype=torch.float32)
    device = getattr(pick, "generator", None) or one
    at_a_time = steps if device.device.type == "cpu" else 1  # a GPU draws many in another order
    parts = [noise_of(pick, outputs, (at_a_time, len(like)), one) for _ in range(steps // at_a_time)]
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


def _search(model: LanguageModel, context: Context, length: int, width: int, unknown: int | None) -> list[int]:
    """The likeliest of the texts that a beam of `width` finds."""
    total = torch.zeros(1, device=context.last.device)  # log P of each beginning
    texts: list[list[int]] = [[]]
    for done in range(length):
        tell("searching", done + 1, length, "tokens")
        following = _next(model, context, unknown)
        on = total[:, None] + following.log_probabilities  # [beginnings, |V|]
        possible = int(on.isfinite().sum())
        if not possible:
            raise FloatingPointError(NO_CHOICE)
        total, best = on.flatten().topk(min(width, possible))
        origin, token = best // on.shape[1], best % on.shape[1]
        texts = [texts[i] + [t] for i, t in zip(origin.tolist(), token.tolist(), strict=True)]
        context = Context(token, map_state(lambda leaf: leaf[origin], following.memory))  # noqa: B023
    return texts[0]
