"""Does every sequence of a batch stand for itself? Operations that may mix them are refused."""

import torch

from loopfold.stepgraph.aten import Product, aten, no_kernel
from loopfold.stepgraph.graph import MIXES, Batch, Node, Refusal, batch_at
from loopfold.stepgraph.moves import moved


def check_rowwise(node: Node) -> None:
    """Refuse an operation that may mix the sequences of a batch, or that is not known to keep them apart."""
    reads = [n for n in node.inputs() if batch_at(n.shape) is not None]
    known = aten(node.op)
    if node.op == "sort" and not node.argument("stable"):  # equal numbers come in an order that hangs on the batch
        raise Refusal(no_kernel(node.op))
    parts = node.op in ("getitem", "log_sigmoid_forward")
    if parts or not reads:
        fine = parts or known.moves or known.same_rows or batch_at(node.shape) is None
    elif node.op in ("native_batch_norm", "_native_batch_norm_legit_no_training"):
        in_training = node.op == "native_batch_norm" and node.args[5]  # then it takes means over the batch
        fine = not in_training and batch_at(reads[0].shape) == 0
    elif is_pointwise(node):
        fine = all(_aligned(n, node) for n in reads)
    elif known.product in (Product.ROWS, Product.OTHER) and node.op in _BATCHED:
        a, b = (batch_at(n.shape) for n in node.inputs()[slice(*known.factors)])
        fine = (a, b) in _BATCHED[node.op] and all(_aligned(n, node) for n in node.inputs()[: known.factors[0]])
    elif node.op == "native_layer_norm":
        fine = not any(isinstance(size, Batch) for size in node.args[1])
    elif node.op == "native_group_norm":
        fine = batch_at(reads[0].shape) == 0
    elif node.op == "embedding":
        fine = node.args[0] not in reads and not any(node.args[3:4])  # scaling by frequency counts across rows
    elif node.op in ("_trilinear", "bucketize", "searchsorted"):
        tables = {"_trilinear": 1, "bucketize": 1, "searchsorted": 0}
        fine = node.args[tables[node.op]] not in reads and all(batch_at(n.shape) == 0 for n in reads)
    elif node.op in ("index", "index_select"):
        rows = len(node.args[1]) == 1 if node.op == "index" else node.args[1] == 0
        if not rows or node.args[0] in reads or batch_at(reads[0].shape) != 0:
            raise Refusal(no_kernel(node.op))
        fine = True
    elif known.moves:
        moved(node)
        fine = True
    elif known.along:
        dim = node.argument("dim")
        dims = dim if isinstance(dim, tuple) else (dim,)
        at, rank = batch_at(reads[0].shape), len(reads[0].shape)
        beside = all(batch_at(n.shape) == at and len(n.shape) == rank for n in node.inputs())
        fine = beside and bool(dims) and all(d is not None and d % rank != at for d in dims)
    elif known.same_rows:
        at = batch_at(node.shape)
        fine = node.op.startswith("new_") if at is None else all(batch_at(n.shape) == at for n in reads)
    else:
        raise Refusal(no_kernel(node.op))
    if not fine:
        raise Refusal(f"aten.{node.op} {MIXES}.")


def is_pointwise(node: Node) -> bool:
    """Whether an operation works number by number, on tensors that torch broadcasts."""
    tagged = node.target is not None and torch.Tag.pointwise in node.target.tags
    return (tagged or aten(node.op).pointwise) and node.op not in ("_to_copy", "clone", "detach", "alias")


# Where the batch may stand in the two factors of a product: never in the dimension that is summed over
_BATCHED: dict[str, set[tuple[int | None, int | None]]] = {
    **dict.fromkeys(("mm", "addmm"), {(0, None), (None, 1)}),
    **dict.fromkeys(("bmm", "baddbmm"), {(0, 0), (1, None), (None, 2)}),
    **dict.fromkeys(("mv", "addmv"), {(0, None)}),
    "convolution": {(0, None)},
}


def _aligned(read: Node, node: Node) -> bool:
    """Whether torch, which lines shapes up at their ends, lays the batch of what is read over that of the result."""
    at, result = batch_at(read.shape), batch_at(node.shape)
    if result is None or at is None:
        return at is None
    return len(read.shape) - at == len(node.shape) - result and read.shape[at] == node.shape[result]
