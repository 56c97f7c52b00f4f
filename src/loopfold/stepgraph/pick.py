"""Features in an order that a buffer says, such as a permutation: an operation with the numbers of the buffer in it.

pick(v, dim, at)        v.index_select(dim, at); where each number comes from is known beforehand
"""

import torch
from torch import Tensor
from torch._ops import OpOverload

torch.library.define("loopfold::pick", "(Tensor v, int dim, int[] at) -> Tensor")


@torch.library.impl("loopfold::pick", "CompositeImplicitAutograd")
def _picked(v: Tensor, dim: int, at: list[int]) -> Tensor:
    return v.index_select(dim, torch.tensor(at, device=v.device))


PICK: OpOverload = torch.ops.loopfold.pick.default
