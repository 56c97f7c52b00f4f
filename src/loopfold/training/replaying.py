"""The loss of one window after the other; on a GPU as CUDA graphs, where windows of a length come often.

A step of training is hundreds of launches, which Python takes longer to order than a fast GPU to do. As a graph, the
way there is one launch, and the way back another.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from loopfold.casts import casts
from loopfold.engines.programs import earn, forgotten
from loopfold.engines.replay import Replays
from loopfold.language.base import Context, LanguageModel
from loopfold.recurrent import is_plain, recurrences_of
from loopfold.regularisers import WeightDrop
from loopfold.states import leaves, rebuild
from loopfold.surroundings import INDICES, fingerprint, global_hooks
from loopfold.training.making import autocast_of
from loopfold.training.options import Options

DEVICES = {"cuda"}
AS_IT_STANDS = 32  # one window of so many is no replay, so that compiled steps go on checking themselves
MOST_GRAPHS = 6  # windows that vary are of five lengths, most of them
MOST_KNOWN = 64  # fingerprints


class Loss(NamedTuple):
    """What training makes small, the losses of all tokens, and where the model stands after them."""

    total: Tensor
    nll: Tensor
    context: Context


class WindowLoss:
    """The loss of `model` on a window, under autocast as the options say; `parallel` is what is called in its place.

    A graph does again what it was captured from. So before each replay it is asked whether the model is what it was, by
    its `fingerprint`, and all tensors that it holds are given to the graph; its cells must be compiled, from traces
    that still hold, and draw no random numbers of their own. Those of dropout are drawn anew at each replay, from the
    seed of the step.
    """

    def __init__(self, options: Options, model: LanguageModel, parallel: nn.Module | None = None) -> None:
        self.options, self.model, self.parallel = options, model, parallel or model
        self.replays = Replays("training", MOST_GRAPHS)
        self.known: dict[tuple[Any, ...], int | None] = {}  # fingerprints, by the call at which each was met
        self.calls = 0
        self.earned = time.monotonic()  # until when checks were given time for

    def __call__(self, tokens: Tensor, context: Context, lengths: Tensor | None, share: float) -> Loss:
        """`share` makes a mean of the sum of all losses."""
        self.calls += 1
        if lengths is None and self.parallel is self.model and tokens.device.type in DEVICES:
            modules, cells = list(self.model.modules()), [part.cell for part in recurrences_of(self.model).values()]
            if self.calls % AS_IT_STANDS == 0:
                self._earn(cells)
            elif not global_hooks() and all(is_plain(part, type(part)) for part in modules):
                traced = tuple(map(forgotten, cells))
                met = None if None in traced or not traced else self._met(modules)
                if met is not None:
                    return self._replayed(modules, (met, traced, share, casts(tokens.device)), tokens, context, share)
        return self._loss(self.parallel, share, tokens, context, lengths)

    def _earn(self, cells: Sequence[Any]) -> None:
        """Give the checks of the cells their share of the time in which windows were replayed."""
        before, self.earned = self.earned, time.monotonic()
        for cell in cells if self.replays.graphs else ():
            earn(cell, (self.earned - before) / len(cells))

    def _replayed(self, modules: list[nn.Module], key: Any, tokens: Tensor, context: Context, share: float) -> Loss:
        held = _held(modules)
        tensors = list({id(t): t for t in held.values()}.values())  # each once, wherever it is used

        def run(given: Sequence[Tensor], own: Sequence[Tensor]) -> list[Tensor]:
            tokens, *before = given
            now = dict(zip(map(id, tensors), own, strict=True))
            with _holding(modules, {place: now[id(t)] for place, t in held.items()}):
                total, nll, after = self._loss(self.model, share, tokens, rebuild(context, before), None)
            return [total, nll, *leaves(after)]

        total, nll, *after = self.replays.run(run, key, [tokens, *leaves(context)], tensors)
        return Loss(total, nll, rebuild(context, after))

    def _met(self, modules: list[nn.Module]) -> int | None:
        """A number for the model as it is now, by its fingerprint; None where other tensors make it another model.

        Such as has its parameters in a list, too, reads them there, whatever stands in their places.
        """
        mark = fingerprint(self.model)
        if mark not in self.known:
            if len(self.known) == MOST_KNOWN:
                self.known.clear()
            held = _held(modules)
            others = {id(t): t.detach() for t in held.values()}
            with _holding(modules, {place: others[id(t)] for place, t in held.items()}):
                same = fingerprint(self.model) == mark
            self.known[mark] = self.calls if same else None
        return self.known[mark]

    def _loss(self, model: Any, share: float, tokens: Tensor, context: Context, lengths: Tensor | None) -> Loss:
        with autocast_of(self.options, tokens.device.type):
            scored = model(tokens, context, lengths)
            return Loss(scored.loss(share), scored.nll, scored.context)


Place = tuple[int, str, str]  # the number of a module, "_parameters" or "_buffers", the name there


def _held(modules: Sequence[nn.Module]) -> dict[Place, Tensor]:
    """The tensors of modules, but for masks, which each window draws, and for indices, which a trace has fixed."""
    found: dict[Place, Tensor] = {}
    for i, part in enumerate(modules):
        for kind in ("_parameters", "_buffers")[: 1 if isinstance(part, WeightDrop) else 2]:
            own = {(i, kind, name): t for name, t in getattr(part, kind).items() if t is not None}
            found |= {place: t for place, t in own.items() if not t.dim() or t.dtype not in INDICES}
    return found


@contextmanager
def _holding(modules: Sequence[nn.Module], tensors: Mapping[Place, Tensor]) -> Iterator[None]:
    """While open, modules hold these. (torch.func.functional_call loses what a module holds that is there twice.)"""

    def put(tensors: Mapping[Place, Tensor]) -> None:
        for (i, kind, name), t in tensors.items():
            getattr(modules[i], kind)[name] = t

    before = {place: getattr(modules[place[0]], place[1])[place[2]] for place in tensors}
    try:
        put(tensors)
        yield
    finally:
        put(before)
