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

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from loopfold.language.base import Context, LanguageModel, Next, Scored
from loopfold.states import alive, whole_number

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

    def __init__(self, tokens: Tensor, vocabulary_size: int, order: int, boundary: int | None = None) -> None:
        super().__init__()
        self.vocabulary_size = whole_number("NGramLM", "vocabulary_size", vocabulary_size)
        if type(order) is not int or order < 0:
            raise ValueError(f"NGramLM needs order as a whole number of at least 0; got {order!r}.")
        if boundary is not None and (type(boundary) is not int or not 0 <= boundary < vocabulary_size):
            raise ValueError(
                f"NGramLM needs boundary as a token from 0 to {vocabulary_size - 1}, or None; got {boundary!r}."
            )
        self.order, self.boundary = order, boundary
        tokens = _whole(tokens, "tokens")
        if tokens.dim() != 1 or not len(tokens):
            raise ValueError(f"NGramLM needs a text of at least one token, [T]; got {tuple(tokens.shape)}.")
        self._within(tokens, self.vocabulary_size - 1, "tokens")
        self._orders = list(_count(tokens.numpy(), vocabulary_size, order, boundary))
        self.entries_by_order = [len(o.keys) - 1 for o in self._orders]  # k-grams in the text, k = 1 … order
        if order:
            self.entries_by_order[0] = len(tokens.unique())  # unseen tokens have a key too

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
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) <= most:
            raise ValueError(
                f"{name} run from {int(tokens.min())} to {int(tokens.max())}; "
                f"a vocabulary of {self.vocabulary_size} needs 0 to {most}."
            )


def _whole(tokens: Tensor, name: str) -> Tensor:
    """Counting and looking up are NumPy's, so on the CPU."""
    if not isinstance(tokens, Tensor):
        raise TypeError(f"{name} must be a tensor; got a {type(tokens).__name__}. Type torch.as_tensor({name}).")
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise TypeError(f"{name} must be whole numbers; got {tokens.dtype}. Type {name}.long().")
    return tokens.long().cpu()


def _count(w: Ints, V: int, n: int, boundary: int | None) -> Iterator[_Order]:
    """The k-grams of the text `w [T]`, k = 1 … n."""
    reach = np.arange(len(w))  # how many tokens a token sees before it
    if boundary is not None:
        w, t = np.append(boundary, w), np.arange(len(w) + 1)
        begin = np.maximum.accumulate(np.where(w == boundary, t, 0))
        reach = t - np.append(1, begin[:-1])  # -1 for the boundary put in front, which is not an event
    reach = np.minimum(reach, n - 1)

    ids, keys, contexts = w, np.arange(V), 1  # ids[t]: of the k-gram that ends at t, where reach[t] ≥ k-1
    for k in range(1, n + 1):
        longer = np.flatnonzero(reach >= k)
        longer_keys, inverse = np.unique(ids[longer - 1] * V + w[longer], return_inverse=True)
        suffix = np.empty(len(longer_keys), np.int64)
        suffix[inverse] = ids[longer]  # of v g, the g
        a = np.bincount(suffix, minlength=len(keys)) + np.bincount(ids[reach == k - 1], minlength=len(keys))
        yield _smooth(keys, a, keys // V, contexts)
        contexts, keys = len(keys), longer_keys
        ids = np.full(len(w), -1)
        ids[longer] = inverse


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
