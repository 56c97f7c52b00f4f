"""Generation: a language model's own tokens go back in. The state is carried, so every token costs the same."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from loopfold.evaluation import evaluating
from loopfold.feeding import Pick, Sample
from loopfold.language.base import Context, LanguageModel, Next
from loopfold.language.recurrent import as_language_model
from loopfold.outputs import Classes
from loopfold.states import map_state, whole_number
from loopfold.text.vocabulary import Vocabulary


@dataclass(frozen=True)
class Beam:
    """Search for a likely text as a whole: of all continuations, keep the `width` likeliest at each step."""

    width: int = 5

    def __post_init__(self) -> None:
        whole_number("Beam", "width", self.width)


def generate(
    model: nn.Module,
    vocabulary: Vocabulary,
    prompt: str = "",
    length: int = 200,
    pick: Pick | Beam = Sample(),
    show: Callable[[str], object] = lambda piece: None,
) -> str:
    """`length` more tokens after `prompt`, as text, without the prompt.

    `pick`  `Sample(generator, temperature, top_k, top_p)`, `Greedy()` or `Beam(width)`
    `show`  is called with each piece of text as soon as there is one: `lambda piece: print(piece, end="")`

    What stands for unknown things is never generated.

    >>> from loopfold import Characters, Greedy, NGramLM
    >>> vocabulary = Characters.of("abcabcabc")
    >>> model = NGramLM(vocabulary.encode("abcabcabc").ids, vocabulary.size, order=3)
    >>> generate(model, vocabulary, "ab", length=5, pick=Greedy())
    'cabca'
    """
    whole_number("generate", "length", length)
    model = as_language_model(model)
    unknown = vocabulary.unknown_in(prompt)
    if unknown:
        raise ValueError(
            f"the prompt holds what the model has never seen: {', '.join(map(repr, unknown[:5]))}"
            f"{', …' if len(unknown) > 5 else ''}. Leave it out."
        )
    pieces: list[str] = []
    text = vocabulary.stream()
    with evaluating(model):
        ids = vocabulary.beginning(prompt)
        for token in ids.tolist():
            text(token)
        context = _read(model, ids)
        found = (
            _search(model, context, length, pick.width, vocabulary.unknown)
            if isinstance(pick, Beam)
            else _draw(model, context, length, pick, vocabulary.unknown)
        )
        for token in found:
            pieces.append(text(token))
            show(pieces[-1])
    return "".join(pieces)


def _read(model: LanguageModel, ids: Tensor) -> Context:
    context = model.initial_context(1)
    return model(ids[:, None].to(context.last.device), context).context if len(ids) else context


def _next(model: LanguageModel, context: Context, unknown: int | None) -> Next:
    """What may follow, without what stands for unknown things."""
    log_p, memory = model.next(context)
    if unknown is not None:
        log_p = log_p.index_fill(1, torch.tensor(unknown, device=log_p.device), -torch.inf)
    return Next(log_p, memory)


def _draw(model: LanguageModel, context: Context, length: int, pick: Pick, unknown: int | None) -> Iterator[int]:
    outputs = Classes(model.vocabulary_size)
    for _ in range(length):
        o, memory = _next(model, context, unknown)
        token = pick(o, outputs).argmax(-1)
        yield int(token)
        context = Context(token, memory)


def _search(model: LanguageModel, context: Context, length: int, width: int, unknown: int | None) -> list[int]:
    """The likeliest of the texts that a beam of `width` finds."""
    total = torch.zeros(1, device=context.last.device)  # log P of each beginning
    texts: list[list[int]] = [[]]
    for _ in range(length):
        following = _next(model, context, unknown)
        on = total[:, None] + following.log_probabilities  # [beginnings, |V|]
        total, best = on.flatten().topk(min(width, int(on.isfinite().sum())))
        origin, token = best // on.shape[1], best % on.shape[1]
        texts = [texts[i] + [t] for i, t in zip(origin.tolist(), token.tolist(), strict=True)]
        context = Context(token, map_state(lambda leaf: leaf[origin], following.memory))  # noqa: B023
    return texts[0]
