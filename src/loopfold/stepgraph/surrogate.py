"""An operation whose gradient is given beside it: what is left of an autograd.Function of the user's own.

y = surrogate(y, a, w)        ∇y passes on to y, and w · ∇y goes to a
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

torch.library.define("loopfold::surrogate", "(Tensor y, Tensor a, Tensor w) -> Tensor", tags=(torch.Tag.pointwise,))


@torch.library.impl("loopfold::surrogate", "CompositeExplicitAutograd")
def _value(y: Tensor, a: Tensor, w: Tensor) -> Tensor:
    return y.clone()


@torch.library.register_fake("loopfold::surrogate")  # type: ignore[untyped-decorator]
def _blank(y: Tensor, a: Tensor, w: Tensor) -> Tensor:
    return torch.empty_like(y)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[2])


def _gradient(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
    (w,) = ctx.saved_tensors
    return g, g * w, None


torch.library.register_autograd("loopfold::surrogate", _gradient, setup_context=_keep)

SURROGATE: OpOverload = torch.ops.loopfold.surrogate.default
