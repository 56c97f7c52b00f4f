"""Operations that move numbers and change none: where each number comes from, found by moving their addresses.

Every number of what an operation reads is replaced by its address, and torch's own operation moves the addresses. It
is done for two sizes of the batch, so it is seen, too, whether its sequences stay apart.
"""

from dataclasses import replace
from typing import Any

import torch

from loopfold.stepgraph.graph import (
    BATCH,
    MIXES,
    Node,
    Refusal,
    apply,
    batch_at,
    features,
    from_rows,
    rows_first,
    sizes_of,
)

_BATCHES = (3, 7)
Positions = tuple[int, ...]  # for each number of a row, which number of another it is; -1: it is zero


def moved(node: Node) -> list[Positions]:
    """For each result of `node`: where its numbers stand in the rows that `node` reads, those side by side.

    >>> from loopfold.stepgraph.graph import BATCH
    >>> h = Node("h", "state", shape=(BATCH, 2, 3))
    >>> moved(Node("T", "transpose", (h, 1, 2), shape=(BATCH, 3, 2), target=torch.ops.aten.transpose.int))
    [(0, 3, 1, 4, 2, 5)]
    """
    if any(other not in sources_of(node) for other in node.inputs()):
        raise Refusal(f"aten.{node.op} puts what changes beside what does not.")
    first, second = (_moved(node, rows) for rows in _BATCHES)
    if first != second or _moves_the_batch(node):
        raise _mixed(node)
    return first


def _moved(node: Node, rows: int) -> list[Positions]:
    """The same for a batch of `rows`."""
    if node.op == "constant_pad_nd":  # whatever it puts beside them, here it is zeros
        node = replace(node, args=node.args[:2])
    sources = sources_of(node)
    widths = [size_of(n.shape) for n in sources]
    width = sum(widths)
    first = torch.arange(1, 1 + width, dtype=torch.float64)  # which all of torch's operations take
    addresses = first + width * torch.arange(rows)[:, None]
    parts = zip(sources, addresses.split(widths, 1), strict=True)
    result = apply(node, {source: from_rows(part, source.shape) for source, part in parts}, rows)
    results = [result] if isinstance(result, torch.Tensor) else list(result)
    shapes = [node.shape] if node.dtype is not None else [_shape(r, node, sources[0].shape) for r in results]
    return [_one(node, r, shape, width, rows) for r, shape in zip(results, shapes, strict=True)]


def _moves_the_batch(node: Node) -> bool:
    """Whether it is one of those that may put sequences elsewhere, or clear them, at other sizes of the batch only."""
    shape = node.inputs()[0].shape
    at = batch_at(shape)
    if node.op == "roll":
        dims = node.args[2] if len(node.args) > 2 else ()
        return not dims or any(d % len(shape) == at for d in dims)
    return node.op in ("tril", "triu") and at is not None and at >= len(shape) - 2


def broadcast(shape: tuple[Any, ...], to: tuple[Any, ...]) -> Positions:
    """Where the numbers of a row of shape `to` stand in one of shape `shape`, which torch broadcasts to it."""
    addresses = torch.arange(size_of(shape))
    one = addresses.view(shape) if batch_at(shape) is None else from_rows(addresses[None], shape)
    return tuple(rows_first(one.expand(sizes_of(to)), to)[0].tolist())


def places_in(node: Node) -> Positions:
    """Where the numbers of what moves a tensor without a batch stand in that tensor."""
    (source,) = node.inputs()
    return flat(apply(node, {source: torch.arange(size_of(source.shape)).view(source.shape)}, 1))


def flat(places: torch.Tensor) -> Positions:
    """Places in the order of a row."""
    return tuple(places.flatten().tolist())


def sources_of(node: Node) -> list[Node]:
    """What a moving operation reads that belongs to a sequence."""
    return list(dict.fromkeys(n for n in node.inputs() if batch_at(n.shape) is not None))


def size_of(shape: tuple[Any, ...]) -> int:
    """How many numbers of such a shape belong to one sequence."""
    return torch.Size(features(shape)).numel()


def _shape(result: torch.Tensor, node: Node, source: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shape of one of several results: of `split`, or of `unbind`, which drops a dimension."""
    kept = list(range(len(source)))
    if result.dim() < len(source):
        del kept[node.args[1] if len(node.args) > 1 else 0]
    return tuple(source[k] if k == batch_at(source) else size for k, size in zip(kept, result.shape, strict=True))


def _one(node: Node, result: torch.Tensor, shape: tuple[Any, ...], width: int, rows: int) -> Positions:
    if batch_at(shape) is None or result.numel() != rows * size_of(shape):
        raise _mixed(node)
    found = rows_first(result, shape).long()
    own = torch.where(found > 0, found - width * torch.arange(rows)[:, None], 0)
    if bool((own != own[0]).any()) or bool((own > width).any()) or bool((own < 0).any()):
        raise _mixed(node)
    return tuple((own[0] - 1).tolist())


def _mixed(node: Node) -> Refusal:
    return Refusal(f"aten.{node.op} {MIXES}, or puts another dimension before them.")


def cut_of(node: Node) -> tuple[Node, int] | None:
    """(whole, start) where `node` is a part of the features of another node."""
    if len(node.shape) != 2 or node.shape[0] != BATCH:
        return None
    if node.op == "getitem" and node.args[0].op in ("split", "split_with_sizes"):
        whole, sizes, *dim = node.args[0].args
        if (dim or [0])[0] not in (-1, 1) or len(whole.shape) != 2:
            return None
        return whole, node.args[1] * sizes if isinstance(sizes, int) else sum(sizes[: node.args[1]])
    if node.op == "slice" and len(node.args) >= 3 and node.args[1] in (-1, 1) and node.args[4:] in ((), (1,)):
        return node.args[0], _wrap(node.args[2] or 0, node.args[0].shape[1])
    return None


def _wrap(start: int, size: int) -> int:
    return max(0, start + size) if start < 0 else start
