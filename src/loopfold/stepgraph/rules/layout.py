"""Operations that move numbers, copy them or make new ones."""

from typing import Any

import torch

from loopfold.stepgraph.aten import MOVING
from loopfold.stepgraph.graph import Node, Refusal
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import moved, size_of, sources_of
from loopfold.stepgraph.rules.registry import rule


@rule("clone", "alias", "_to_copy")
def _same(hoist: Any, node: Node, v: Any, **options: Any) -> Any:
    before, after = node.args[0].dtype, node.dtype
    if before == after or after == torch.bool:
        return v if before == after else hoist.condition(v)
    assert after is not None
    whole = before.is_floating_point and not after.is_floating_point
    return hoist.builder.make("trunc", hoist.builder.make("detach", hoist.row(v))) if whole else hoist.row(v)


@rule("detach")
def _detach(hoist: Any, node: Node, v: Any) -> Any:
    return v if node.dtype == torch.bool else hoist.builder.make("detach", hoist.row(v))


@rule(*MOVING)
def _move(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Any:
    """Where each number comes from, torch itself says."""
    rows = [hoist.row(hoist.argument(source)) for source in sources_of(node)]
    whole, found = rows[0] if len(rows) == 1 else hoist.builder.cat(rows), moved(node)
    beside = node.argument("value") if node.op == "constant_pad_nd" else 0
    if beside:
        found = [tuple(whole.width if p < 0 else p for p in positions) for positions in found]
        whole = hoist.builder.cat([whole, hoist.builder.number(beside)])
    results = [hoist.builder.take(whole, positions) for positions in found]
    return results if node.dtype is None else results[0]


@rule(
    "empty_like",
    "empty",
    "new_empty",
    "zeros_like",
    "zeros",
    "new_zeros",
    "ones_like",
    "ones",
    "new_ones",
    "full_like",
    "full",
    "new_full",
)
def _full(hoist: Any, node: Node, *arguments: Any, **options: Any) -> Value:
    if node.dtype is None or not node.dtype.is_floating_point:
        raise Refusal(f"a tensor of {node.dtype} has no kernel.")
    number = 1.0 if "ones" in node.op else 0.0
    if "full" in node.op:
        number = float(options.get("fill_value", arguments[-1]))
    return hoist.builder.expand(hoist.builder.number(number), size_of(node.shape))
