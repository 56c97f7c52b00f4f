"""Does every sequence of a batch stand for itself? Operations that may mix them are refused."""

import torch

from loopfold.stepgraph.aten import aten
from loopfold.stepgraph.graph import BATCH, Node, Refusal


def check_rowwise(node: Node) -> None:
    """Refuse an operation that may mix the sequences of a batch, or that is not known to keep them apart."""
    reads = [n for n in node.inputs() if BATCH in n.shape]
    rank, known = len(node.shape), aten(node.op)
    fine = False
    if node.op == "getitem":
        fine = True
    elif node.target is not None and (torch.Tag.pointwise in node.target.tags or known.pointwise):
        fine = all(len(n.shape) == rank and n.shape[0] is BATCH for n in reads) and not any(
            n not in reads and len(n.shape) == rank and n.shape[0] != 1 for n in node.inputs()
        )
    elif node.op == "mm":
        fine = node.args[0] in reads and node.args[1] not in reads
    elif node.op == "addmm":
        fine = node.args[1] in reads and node.args[2] not in reads and len(node.args[0].shape) < 2
    elif node.op == "native_layer_norm":
        fine = BATCH not in node.args[1]
    elif node.op == "embedding":
        fine = node.args[0] not in reads and not any(node.args[3:4])  # scaling by frequency counts across rows
    elif known.dimension is not None:
        first = reads[0] if reads else node
        size = len(first.shape) + (node.op in ("unsqueeze", "stack"))
        dims = node.args[known.dimension :][:1] or (0,)
        dims = dims[0] if isinstance(dims[0], tuple) else dims
        fine = bool(dims) and all(d is not None and d % size != 0 for d in dims)
    elif known.same_rows:
        fine = all(n.shape and n.shape[0] is BATCH for n in (*reads, node))
    else:
        raise Refusal(f"aten.{node.op} has no rule.")
    if not fine:
        raise Refusal(f"aten.{node.op} mixes the sequences of a batch.")
