"""Products: of rows with a matrix, and of what changes with what changes."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from loopfold.stepgraph.graph import BATCH, Batch, Node, Refusal, sizes_of
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.moves import flat, size_of
from loopfold.stepgraph.recipes import Matrix, Recipe
from loopfold.stepgraph.rules.registry import rule

MOST_TERMS = 1 << 18  # of all sums in a product of what changes with what changes
MOST_WEIGHTS = 1 << 20  # of a convolution as a matrix: with more, its zeros cost more than Python does
MOST_PRODUCTS = 16  # of rows of one sequence by a matrix, each compiled by itself


@rule("mm", "bmm")
def _product(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    return _multiply(hoist, node.args[0], node.args[1], a, b)


@rule("addmm", "baddbmm")
def _plus_product(hoist: Any, node: Node, bias: Any, a: Any, b: Any, beta: float = 1, alpha: float = 1) -> Value:
    product = hoist.builder.mul(float(alpha), _multiply(hoist, node.args[1], node.args[2], a, b))
    bias = hoist.broadcast(node.args[0], bias, node.shape)
    return hoist.builder.add(hoist.builder.mul(beta, hoist.row(bias)), product)


@rule("mv")
def _mv(hoist: Any, node: Node, a: Any, b: Any) -> Value:
    row = hoist.broadcast(node.args[1], b, node.args[0].shape)
    return hoist.builder.make("sum", hoist.builder.mul(a, hoist.row(row)), width=size_of(node.shape))


@dataclass(frozen=True)
class _AsMatrix:
    """What a convolution does to `[…, channels, places…]`, as a matrix: its rows are what it makes of one-hots."""

    sizes: tuple[int, ...]
    how: tuple[Any, ...]  # stride, padding, dilation, transposed, output padding, groups

    def __call__(self, weight: torch.Tensor) -> torch.Tensor:
        k = math.prod(self.sizes)
        ones = torch.eye(k, dtype=weight.dtype, device=weight.device).view(k, *self.sizes)
        return torch.convolution(ones, weight, None, *self.how).flatten(1)


@rule("convolution")
def _convolution(hoist: Any, node: Node, v: Any, weight: Any, bias: Any, *how: Any) -> Value:
    read, filters, bias_node = node.args[:3]
    if not isinstance(v, Value) or isinstance(weight, Value) or read.shape[0] != BATCH:
        raise Refusal("a convolution whose filters change, or over another dimension before the batch, has no kernel.")
    shape = size_of(read.shape), size_of(node.shape)
    if math.prod(shape) > MOST_WEIGHTS:
        raise Refusal(
            f"a convolution of {shape[0]} numbers into {shape[1]} is too large: as a matrix it has no kernel."
        )
    settings = tuple(tuple(h) if isinstance(h, list | tuple) else h for h in how)
    made = _AsMatrix(sizes_of(read.shape)[1:], settings)
    product = hoist.matmul(v, Matrix(filters, shape, made=made))
    if bias_node is None:
        return product
    places, dtype = shape[1] // node.shape[1], hoist.dtype
    each = Recipe(lambda b: b.repeat_interleave(places).to(dtype), (bias_node,))
    return hoist.builder.add(product, hoist.constant(each, shape[1], ("each place", bias_node, places)))


@rule("_trilinear")
def _bilinear(hoist: Any, node: Node, a: Any, weight: Any, c: Any, *how: Any) -> Value:
    """As nn.Bilinear has it: every number of one row times every number of another, and all of these by a matrix."""
    left, filters, right = node.args[:3]
    sizes = [n.shape[1] for n in (left, right) if len(n.shape) == 2]
    if how[:4] != ((1, 3), (0,), (1, 2), (2, 3)) or len(sizes) != 2 or isinstance(weight, Value):
        raise Refusal("aten._trilinear has a kernel as F.bilinear of rows [batch, n] alone has it.")
    if math.prod(sizes) > MOST_TERMS:
        raise Refusal(f"a bilinear product of {sizes[0]} and {sizes[1]} numbers is too large for a kernel.")
    m, places = hoist.builder, torch.arange(math.prod(sizes)).view(sizes)
    first, second = places // sizes[1], places % sizes[1]
    rows = [m.take(hoist.row(v), flat(at)) for v, at in ((a, first), (c, second))]
    return hoist.matmul(m.mul(*rows), Matrix(filters, (math.prod(sizes), node.shape[1]), (), True, _each_in_a_row))


def _each_in_a_row(weight: torch.Tensor) -> torch.Tensor:
    return weight.flatten(1)


def _multiply(hoist: Any, a: Node, b: Node, left: Any, right: Any) -> Value:
    """Rows by matrices that are the same at every step; or both change, and every sequence multiplies its own."""
    if isinstance(left, Value) and isinstance(right, Value):
        return _each_with_its_own(hoist, a, b, left, right)
    fixed, v = (b, left) if isinstance(left, Value) else (a, right)
    moving = a if fixed is b else b
    *many, depth, columns = fixed.shape if fixed is b else (*fixed.shape[:-2], *fixed.shape[:-3:-1])
    times = next(size.times for size in moving.shape if isinstance(size, Batch))
    blocks = many[0] if many else 1
    if fixed is a and times > 1:  # columns of every sequence: made rows, and columns again
        v = _turned(hoist, v, (blocks, depth, times))
    if blocks * times > MOST_PRODUCTS and blocks * times * depth * columns <= MOST_TERMS:
        product = _sums_of_products(hoist, v, fixed, (blocks, times, columns, depth), fixed is a)
    else:
        parts: list[Value] = []
        for i in range(blocks):
            matrix = Matrix(fixed, (depth, columns), (i,) if many else (), fixed is a)
            starts = [(i * times + k) * depth for k in range(times)]
            parts += [hoist.matmul(hoist.builder.slice(v, start, depth), matrix) for start in starts]
        product = hoist.builder.cat(parts)
    return _turned(hoist, product, (blocks, times, columns)) if fixed is a and times > 1 else product


def _turned(hoist: Any, v: Value, sizes: tuple[int, int, int]) -> Value:
    """A row of such sizes with the last two exchanged."""
    return hoist.builder.take(v, flat(torch.arange(v.width).view(sizes).mT))


def _sums_of_products(hoist: Any, v: Value, fixed: Node, sizes: tuple[int, ...], transposed: bool) -> Value:
    """Many rows by one small matrix, where as many products would be long to compile."""
    blocks, times, columns, depth = sizes
    m, dtype = hoist.builder, hoist.dtype

    def repeated(matrix: torch.Tensor) -> torch.Tensor:
        matrix = matrix if transposed else matrix.mT  # [columns, depth]
        return matrix.reshape(blocks, 1, columns, depth).expand(sizes).reshape(-1).to(dtype).contiguous()

    width = math.prod(sizes)
    weights = hoist.constant(Recipe(repeated, (fixed,)), width, ("repeated", fixed, sizes, transposed))
    rows = torch.arange(v.width).view(blocks, times, 1, depth).expand(sizes)
    return m.make("sum", m.mul(m.take(v, flat(rows)), weights), width=blocks * times * columns)


def _each_with_its_own(hoist: Any, a: Node, b: Node, left: Value, right: Value) -> Value:
    """[k, i, c] times [k, c, j]: all products, summed over c."""
    (k, i, c), j = sizes_of(a.shape), b.shape[2]
    if k * i * j * c > MOST_TERMS:
        raise Refusal(f"a product [{k}, {i}, {c}] @ [{k}, {c}, {j}] for every sequence is too large for a kernel.")
    m, terms = hoist.builder, (k, i, j, c)
    first = torch.arange(k * i * c).view(k, i, 1, c).expand(terms)
    second = torch.arange(k * c * j).view(k, 1, c, j).transpose(2, 3).expand(terms)
    product = m.mul(*(m.take(v, flat(at)) for v, at in ((left, first), (right, second))))
    return product if c == 1 else m.make("sum", product, width=k * i * j)
