"""What is known of torch's own operations, one entry each; of those that are not here nothing is known."""

from dataclasses import dataclass
from enum import Enum

from torch._ops import OpOverload


class Product(Enum):
    """How an operation multiplies two of the tensors that it reads."""

    EACH = "number by number"
    ROWS = "rows [batch, k] by a matrix [k, m]"
    OTHER = "tensors in some other way"
    LOOKUP = "a row of a table: its product with a one-hot vector"


class Truth(Enum):
    """How the loop language computes an operation of truth values that is none of its own."""

    SAME = "they are passed on as they are"
    AS_NUMBERS = "on 0 and 1; whatever is not 0 is true"
    UNKNOWN = "it cannot"


@dataclass(frozen=True)
class Aten:
    """What is known of one operation.

    `symbol`     what stands in its box in a drawing; by default its name
    `product`    None: it multiplies no tensors
    `factors`    which of the tensors that it reads it multiplies: from the first number up to the second
    `moves`      it puts numbers elsewhere and changes none
    `along`      it works along the dimensions that its argument `dim` says; the others stand for themselves
    `same_rows`  if its result begins with the batch, so does what it reads, row for row
    `pointwise`  as torch's own tag of that name, which not every version of torch gives it
    `truth`      what it does where its result is truth values
    `choices`    it may give, or compute with, whole numbers that the step has made itself: places and indices
    `numbers`    the arguments at which a plain number may be another at every call; of the loop's own operations, all
    """

    symbol: str = ""
    product: Product | None = None
    factors: tuple[int, int] = (0, 0)
    moves: bool = False
    along: bool = False
    same_rows: bool = False
    pointwise: bool = False
    truth: Truth = Truth.UNKNOWN
    choices: bool = False
    numbers: tuple[int, ...] = ()


# Where each number goes is the same whatever the numbers are; found by `moves`
MOVING = (
    *("view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "permute", "t", "transpose"),
    *("slice", "select", "split", "split_with_sizes", "unbind", "cat", "stack", "repeat", "flip", "roll"),
    *("constant_pad_nd", "diagonal", "tril", "triu", "unfold", "slice_scatter", "select_scatter", "pick"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d", "diag_embed", "rot90"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "diagonal_scatter", "im2col"),
    *("upsample_nearest1d", "upsample_nearest2d", "_upsample_nearest_exact1d", "_upsample_nearest_exact2d"),
)
_BOTH, _LAST_TWO = (0, 2), (1, 3)
_KNOWN = {
    # number by number
    "add": Aten("+", truth=Truth.AS_NUMBERS),
    "sub": Aten("−"),
    "rsub": Aten("−", pointwise=True, numbers=(0, 1)),
    "mul": Aten(r"$\odot$", Product.EACH, _BOTH, truth=Truth.AS_NUMBERS),
    "div": Aten("÷", Product.EACH, _BOTH),
    "neg": Aten("−"),
    "maximum": Aten(truth=Truth.AS_NUMBERS),
    "minimum": Aten(truth=Truth.AS_NUMBERS),
    "where": Aten(truth=Truth.AS_NUMBERS, choices=True),
    **{op: Aten(sign, choices=True) for op, sign in zip(("eq", "ne", "lt", "le", "gt", "ge"), "=≠<≤>≥", strict=True)},
    "lerp": Aten(numbers=(2,)),
    "clamp": Aten(numbers=(1, 2), choices=True),
    "clamp_min": Aten(numbers=(1,)),
    "clamp_max": Aten(numbers=(1,)),
    "sigmoid": Aten(r"$\sigma$"),
    "relu": Aten("ReLU"),
    **dict.fromkeys(("leaky_relu", "hardswish", "_prelu_kernel"), Aten(pointwise=True)),
    "masked_fill": Aten(truth=Truth.AS_NUMBERS),
    "remainder": Aten(choices=True),
    "floor_divide": Aten(pointwise=True),
    **dict.fromkeys(("isnan", "isinf", "isposinf", "isneginf", "signbit"), Aten(truth=Truth.SAME)),
    **dict.fromkeys(("bitwise_xor", "logical_xor"), Aten(truth=Truth.SAME)),
    # products
    "mm": Aten("@", Product.ROWS, _BOTH),
    "addmm": Aten("@", Product.ROWS, _LAST_TWO),  # addmm(b, h, W) adds its first
    "bmm": Aten("@", Product.OTHER, _BOTH),
    "baddbmm": Aten("@", Product.OTHER, _LAST_TWO),
    "mv": Aten("@", Product.OTHER, _BOTH),
    "addmv": Aten("@", Product.OTHER, _LAST_TWO),
    "dot": Aten("@", Product.OTHER, _BOTH),
    "convolution": Aten("", Product.OTHER, _BOTH),
    "_trilinear": Aten("@", Product.OTHER, (0, 3)),
    **dict.fromkeys(("bucketize", "searchsorted"), Aten(choices=True)),
    "embedding": Aten("look up", Product.LOOKUP, _BOTH, choices=True),
    "index": Aten("", Product.LOOKUP, _BOTH, choices=True),
    "index_select": Aten("", Product.LOOKUP, _BOTH, choices=True),
    # along dimensions
    **dict.fromkeys(
        ("sum", "argmax", "argmin", "max", "min", "sort", "gather", "scatter"), Aten(along=True, choices=True)
    ),
    **dict.fromkeys(("mean", "nansum", "prod", "cumsum", "cumprod", "logsumexp", "glu"), Aten(along=True)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean", "linalg_vector_norm", "norm"), Aten(along=True)),
    **dict.fromkeys(("amax", "amin"), Aten(along=True, truth=Truth.AS_NUMBERS)),
    **dict.fromkeys(("any", "all"), Aten(along=True, truth=Truth.SAME)),
    **dict.fromkeys(("_softmax", "_safe_softmax"), Aten("softmax", along=True)),
    "_log_softmax": Aten(along=True),
    "native_layer_norm": Aten("norm"),
    "native_group_norm": Aten("norm"),
    # numbers put elsewhere
    "getitem": Aten(moves=True, truth=Truth.SAME, choices=True),
    **dict.fromkeys(("clone", "alias", "detach"), Aten(moves=True, same_rows=True, truth=Truth.SAME, choices=True)),
    "_to_copy": Aten(same_rows=True, truth=Truth.SAME, choices=True),
    **dict.fromkeys(MOVING, Aten(moves=True, truth=Truth.AS_NUMBERS, choices=True)),
    # new tensors
    **dict.fromkeys(("zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones"), Aten(same_rows=True)),
    **dict.fromkeys(("full", "full_like", "new_full", "empty", "empty_like", "new_empty"), Aten(same_rows=True)),
}


_INDEX = "A buffer of whole numbers as the index, h[:, self.order], has one; so have slices, flip and roll."
_INSTEAD = {
    **dict.fromkeys(("sort", "topk", "kthvalue", "median"), "torch.sort(v, dim=-1, stable=True) has one."),
    **dict.fromkeys(("index", "index_select", "scatter_add", "index_add"), _INDEX),
}


def no_kernel(op: str) -> str:
    """That an operation cannot be compiled, and what can be."""
    return f"aten.{op} has no kernel. {_INSTEAD.get(op, '')}".rstrip()


def aten(op: str) -> Aten:
    """What is known of torch's operation `op`.

    >>> aten("addmm").product, aten("topk").moves
    (<Product.ROWS: 'rows [batch, k] by a matrix [k, m]'>, False)
    """
    return _KNOWN.get(op, Aten())


def op_name(func: OpOverload) -> str:
    """torch's operation by its name alone, whatever the overload."""
    return func._schema.name.rpartition("::")[2]
