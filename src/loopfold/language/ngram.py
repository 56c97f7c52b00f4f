"""n-grams: P(token | the n-1 tokens before it) from counts, by modified Kneser-Ney smoothing, interpolated.

A k-gram `h w` is a context h of k-1 tokens and the token w after it; h′ is h without its oldest token. Order by order,

    P_0(w)     = 1 / |V|
    P_k(w | h) = (a(h w) - D(a(h w))) / A(h) + γ(h) P_{k-1}(w | h′),    P_{k-1}(w | h′) where nothing followed h
    A(h)       = Σ_w a(h w)
    γ(h)       = Σ_w D(a(h w)) / A(h)
    a(g)       = #{v : v g is in the text} + #{places of g in the text with nothing before it}

and P = P_n. The model sees nothing before an n-gram, so n-grams have their plain counts, and so does what begins with
the boundary; everything else counts the different tokens that it continues. A count a loses D(a) = D_min(a, 3),
D(0) = 0. For each k by itself, with n_i the number of k-grams whose a is i,

    Y = n_1 / (n_1 + 2 n_2),    D_i = i - (i+1) Y n_{i+1} / n_i,    i = 1, 2, 3

These are equation (26) of Chen and Goodman, "An empirical study of smoothing techniques for language modeling", Harvard
TR-10-98 (1998). Small or odd texts lack an n_i or give D_i ≤ 0: then that k has D = ½, 1, 1½ (the fallback of KenLM).
So 0 < D_i ≤ i, hence γ > 0, and no token is impossible.
"""

import contextlib
import os
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopfold.language.base import Context, LanguageModel, Next, Scored
from loopfold.states import alive, whole_number
from loopfold.telling import tell
from loopfold.text.long import LARGE, unnamed_file

_AT_A_TIME = 1 << 22  # places of the text
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Order(NamedTuple):
    """The k-grams of one k. Each array ends with the entry of what was never seen, so that its id can be -1."""

    keys: Ints  # sorted: (id of the context among the (k-1)-grams) · |V| + token; the place in here is the k-gram's id
    share: Floats  # (a - D(a)) / A of each k-gram
    gamma: Floats  # γ of each (k-1)-gram


class NGramLM(LanguageModel):
    """P(w | the order-1 tokens before it) as counted in `tokens [T]`; order 0 is uniform, 1 knows no context.

    No context reaches back past a `boundary` token (the `<eos>` of words), and the text begins as if after one.

    >>> text = torch.tensor([0, 1, 0, 1, 2, 0, 1, 0, 1, 2])
    >>> model = NGramLM(text, vocabulary_size=3, order=2)
    >>> model.entries, model.table_size
    (7, 9)
    >>> scored = model(text[:, None], model.initial_context(batch=1))
    >>> round(scored.nll.mean().exp().item(), 3)  # perplexity
    1.774
    >>> model.next(scored.context).log_probabilities.exp().argmax().item()  # after a 2
    0
    """

    def __init__(
        self,
        tokens: Tensor,
        vocabulary_size: int,
        order: int,
        boundary: int | None = None,
        *,
        counted: "Counted | None" = None,
    ) -> None:
        super().__init__()
        self.vocabulary_size = whole_number("NGramLM", "vocabulary_size", vocabulary_size)
        if type(order) is not int or order < 0:
            raise ValueError(f"NGramLM needs order as a whole number of at least 0; got {order!r}.")
        if boundary is not None and (type(boundary) is not int or not 0 <= boundary < vocabulary_size):
            raise ValueError(
                f"NGramLM needs boundary as a token from 0 to {vocabulary_size - 1}, or None; got {boundary!r}."
            )
        self.order, self.boundary = order, boundary
        tokens = _checked(tokens, "tokens").cpu()
        if tokens.dim() != 1 or not len(tokens):
            raise ValueError(f"NGramLM needs a text of at least one token, [T]; got {tuple(tokens.shape)}.")
        self._within(tokens, self.vocabulary_size - 1, "tokens")
        counted = counted or Counted(tokens, vocabulary_size, boundary)
        self._orders = counted.orders(order)
        self.entries_by_order = [len(o.keys) - 1 for o in self._orders]  # k-grams in the text, k = 1 … order
        if order:
            self.entries_by_order[0] = counted.kinds  # unseen tokens have a key too

    @classmethod
    def rising(cls, tokens: Tensor, vocabulary_size: int, boundary: int | None = None) -> "Iterator[NGramLM]":
        """The models of order 0, 1, 2, … one after the other, from one count: each is what `NGramLM` itself makes."""
        counted = Counted(_checked(tokens, "tokens").cpu(), vocabulary_size, boundary)
        return (cls(tokens, vocabulary_size, order, boundary, counted=counted) for order in count())

    @property
    def entries(self) -> int:
        """The number of n-grams kept, of all orders."""
        return sum(self.entries_by_order)

    @property
    def table_size(self) -> int:
        """The number of entries of the full table, |V|ⁿ."""
        return self.vocabulary_size**self.order

    def initial_context(self, batch: int) -> Context:
        nothing = torch.full((batch, max(self.order - 2, 0) + 1), self.vocabulary_size)
        return Context(nothing[:, 0], nothing[:, 1:])

    def forward(self, tokens: Tensor, context: Context, lengths: Tensor | None = None) -> Scored:
        device, tokens = tokens.device, _whole(tokens, "tokens")
        if tokens.dim() != 2:
            raise ValueError(f"tokens must be [τ, batch]; got {tuple(tokens.shape)}.")
        tau, batch = tokens.shape
        before = self._read(context)
        if before.shape[1] != batch:
            raise ValueError(
                f"tokens {tuple(tokens.shape)} need a context of {batch} texts; got one of {before.shape[1]}. "
                f"Type model.initial_context({batch})."
            )
        ends = torch.full((batch,), tau) if lengths is None else _whole(lengths, "lengths")
        if ends.shape != (batch,) or not ((ends >= 0) & (ends <= tau)).all():
            raise ValueError(f"lengths must be {batch} whole numbers from 0 to {tau}; got {ends.tolist()}.")
        there = alive(tokens, ends)
        tokens = tokens.where(there, 0)  # whatever fills the rest of a column
        self._within(tokens, self.vocabulary_size - 1, "tokens")

        w, m = torch.cat([before, tokens]), len(before)
        ids = self._ids(w.numpy())
        p = np.full((tau, batch), 1 / self.vocabulary_size)
        for k, o in enumerate(self._orders):
            h, hw = ids[k][m - k : -1], ids[k + 1][m - k :]  # the contexts and the (k+1)-grams of the τ tokens
            p = o.share[hw] + o.gamma[h] * p
        nll = torch.from_numpy(-np.log(p)).where(there, 0)

        last = w.gather(0, torch.arange(m)[:, None] + ends)  # [m, batch], the end of each text
        return Scored(nll.to(device), Context(last[-1].to(device), last[:-1].T.to(device)))

    def next(self, context: Context) -> Next:
        V, before = self.vocabulary_size, self._read(context)
        p = np.full((before.shape[1], V), 1 / V)
        for o, ids in zip(self._orders, self._ids(before.numpy()), strict=False):  # the last ids have no successors
            h = ids[-1]
            p *= o.gamma[h][:, None]
            for i, (start, end) in enumerate(np.searchsorted(o.keys, np.stack([h * V, h * V + V], 1))):
                p[i, o.keys[start:end] - h[i] * V] += o.share[start:end]  # all that followed this h stands together
        device = context.last.device
        return Next(torch.from_numpy(np.log(p)).to(device), before[1:].T.to(device))

    def _ids(self, w: Ints) -> list[Ints]:
        """For k = 0 … n, the ids of the k-grams that end at each of the tokens `w [T, batch]`: `[T + 1 - k, batch]`.

        The empty one, of id 0, ends before the first token too.
        """
        V = self.vocabulary_size
        w = np.where(w == V, -1 if self.boundary is None else self.boundary, w)  # what "nothing" means to the counts
        ids = [np.zeros((len(w) + 1, w.shape[1]), np.int64)]
        for k, o in enumerate(self._orders):
            h, last = ids[k][:-1], w[k:]
            key = np.where(last >= 0, h * V + last, -1)  # below 0, so not found, where h or last is -1
            place = np.searchsorted(o.keys, key)
            ids.append(np.where(o.keys[place] == key, place, -1))
        return ids

    def _read(self, context: Context) -> Tensor:
        """The tokens of a context, the oldest first: `[m, batch]`."""
        last, memory = context
        width = max(self.order - 2, 0)
        if last.dim() != 1 or memory.shape != (len(last), width):
            raise ValueError(
                f"the context has last {tuple(last.shape)} and memory {tuple(memory.shape)}; order {self.order} needs "
                f"[batch] and [batch, {width}]. Start from model.initial_context(batch)."
            )
        before = torch.cat([_whole(memory, "memory").T, _whole(last, "last")[None]])
        self._within(before, self.vocabulary_size, "the context's tokens")  # |V| is "nothing"
        return before

    def _within(self, tokens: Tensor, most: int, name: str) -> None:
        w = tokens.numpy()  # torch has no min of uint16
        if w.size and not 0 <= int(w.min()) <= int(w.max()) <= most:
            raise ValueError(
                f"{name} run from {int(w.min())} to {int(w.max())}; "
                f"a vocabulary of {self.vocabulary_size} needs 0 to {most}."
            )


def _whole(tokens: Tensor, name: str) -> Tensor:
    """Counting and looking up are NumPy's, so on the CPU."""
    return _checked(tokens, name).long().cpu()


def _checked(tokens: Tensor, name: str) -> Tensor:
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor; got a {type(tokens).__name__}. Type torch.as_tensor({name}).")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers; got {tokens.dtype}. Type {name}.long().")
    return tokens


# ------------------------------------------------------------------ counting


class Counted:
    """The k-grams of a text `[T]`, for k = 1, 2, … in turn. In memory are their tables, and a piece of the text.

    Of each place the id of the k-gram that ends there is kept too; those of a long text, in a file.
    """

    def __init__(self, tokens: Tensor, vocabulary_size: int, boundary: int | None) -> None:
        self._w, self._V, self._boundary = tokens.numpy(), vocabulary_size, boundary
        self._lower: list[_Order] = []
        self._k, self._contexts, self.kinds = 0, 0, 0

    def orders(self, n: int) -> list[_Order]:
        """Those of the model of order n, which does not fall from call to call."""
        if n < self._k:
            raise ValueError(f"the text is counted up to order {self._k} already; got order {n}.")
        if n and not self._k:
            self._begin()
        while self._k < n:
            self._lower.append(self._longer())
            tell("counting n-grams", self._k, n, "orders")
        return [*self._lower, _smooth(self._keys, self._plain(), self._keys // self._V, self._contexts)] if n else []

    def _begin(self) -> None:
        """With k = 1, where the ids are the tokens."""
        self._k, self._contexts, self._keys = 1, 1, np.arange(self._V)
        T = len(self._w) + (self._boundary is not None)  # the boundary that is put in front is a place too
        self._ids = _array(T)  # of the k-gram that ends at a place, where there is one
        for here, w, _ in self._pieces():
            self._ids[here] = w
        self.kinds = int(np.count_nonzero(self._plain()))

    def _pieces(self) -> Iterator[tuple[slice, Ints, Ints]]:
        """Stretches of the text: where, the tokens, and how many tokens each of them sees before it."""
        boundary, front = self._boundary, self._boundary is not None
        begin = 0  # the last boundary
        for start in range(0, len(self._ids), _AT_A_TIME):
            w = self._w[max(start - front, 0) : start + _AT_A_TIME - front].astype(np.int64)
            w = w if boundary is None or start else np.append(boundary, w)
            t = np.arange(start, start + len(w))
            reach = t
            if front:
                begins = np.maximum.accumulate(np.where(w == boundary, t, begin))
                reach = t - np.append(begin if start else 1, begins[:-1])  # -1 in front, where nothing happens
                begin = int(begins[-1])
            yield slice(start, start + len(w)), w, reach

    def _plain(self) -> Ints:
        """How often each k-gram occurs."""
        c = np.zeros(len(self._keys), np.int64)
        for here, _, reach in self._pieces():
            c += np.bincount(self._ids[here][reach >= self._k - 1], minlength=len(c))
        return c

    def _keyed(self) -> Iterator[tuple[slice, Ints, Ints, Ints]]:
        """Where; the ids of the k-grams there; how far each place sees; the keys of the (k+1)-grams that end there."""
        last = np.zeros(1, np.int64)
        for here, w, reach in self._pieces():
            ids = self._ids[here].astype(np.int64)
            yield here, ids, reach, (np.append(last, ids[:-1]) * self._V + w)[reach >= self._k]
            last = ids[-1:]

    def _longer(self) -> _Order:
        """Go on to k + 1, and leave the k-grams with the counts of a lower order."""
        found, more = np.empty(0, np.int64), [np.empty(0, np.int64)]
        for *_, keys in self._keyed():
            more.append(_once(keys))
            if sum(map(len, more)) > len(found) + _AT_A_TIME:
                found, more = _once(np.concatenate([found, *more])), []
        longer_keys = _once(np.concatenate([found, *more]))
        suffix = np.empty(len(longer_keys), np.int64)  # of v g, the g
        a = np.zeros(len(self._keys), np.int64)
        for here, ids, reach, keys in self._keyed():
            once, inverse = np.unique(keys, return_inverse=True)  # what is sorted is found much faster
            place, longer = np.searchsorted(longer_keys, once)[inverse], reach >= self._k
            suffix[place] = ids[longer]
            a += np.bincount(ids[reach == self._k - 1], minlength=len(a))
            self._ids[here][longer] = place
        a += np.bincount(suffix, minlength=len(a))
        lower = _smooth(self._keys, a, self._keys // self._V, self._contexts)
        self._k, self._contexts, self._keys = self._k + 1, len(self._keys), longer_keys
        return lower


def _once(keys: Ints) -> Ints:
    """Each key once, sorted: as np.unique, whose table of hashes is slow where most differ."""
    keys = np.sort(keys)
    return keys[np.append(True, keys[1:] != keys[:-1])[: len(keys)]]


def _array(size: int) -> NDArray[Any]:
    """Zeros for whole numbers up to `size`: in memory or, where they are many, in a file without a name."""
    dtype = np.dtype(np.int32 if size < 1 << 31 else np.int64)
    if size >= LARGE and hasattr(os, "posix_fallocate"):
        with contextlib.suppress(OSError), unnamed_file() as file:
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)  # a full disk is fatal to who writes to a map
            return np.memmap(file, dtype, "r+", shape=(size,))
    return np.zeros(size, dtype)


def _smooth(keys: Ints, a: Ints, h: Ints, contexts: int) -> _Order:
    """`a [K]` of each k-gram, and the id `h [K]` of its context, as the two terms of P_k."""
    n = np.bincount(a, minlength=5).tolist()  # n[i]: how many k-grams have a = i
    D = np.array([0.0, *_discounts(n)])[np.minimum(a, 3)]
    A = np.bincount(h, a, minlength=contexts)
    removed = np.bincount(h, D, minlength=contexts)
    gamma = np.divide(removed, A, out=np.ones(contexts), where=A > 0)
    return _Order(np.append(keys, np.iinfo(np.int64).max), np.append((a - D) / A[h], 0.0), np.append(gamma, 1.0))


def _discounts(n: list[int]) -> list[float]:
    """D_1, D_2 and D_3; in fractions, so that a D of 0 is not mistaken for a little more."""
    if all(n[1:4]):
        Y = Fraction(n[1], n[1] + 2 * n[2])
        D = [i - (i + 1) * Y * n[i + 1] / n[i] for i in (1, 2, 3)]  # (26)
        if min(D) > 0:
            return [float(d) for d in D]
    return [0.5, 1.0, 1.5]
