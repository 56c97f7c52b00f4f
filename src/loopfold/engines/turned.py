"""Products with a matrix that is read where it lies, as a user's own W [m, k]: y = W h, row by row of W.

For steps that are taken one at a time: a copy in a better order would have to be made again whenever W changes, and
nothing says so when another process, or another view of the same memory, writes to it.
"""

from typing import Any

from llvmlite import ir

from loopfold.engines.rows import Rows
from loopfold.engines.writing import Buffer, Role
from loopfold.stepgraph.loop import Value


class Turned(Rows):
    """A function under construction that multiplies by matrices turned round."""

    def _turned_product(self, v: Value, pitch: int) -> None:
        """y[r, j] = Σ_k row[r, k] · W[j, k], where rows of W stand `pitch` numbers apart; several j at a time."""
        left, tile, lanes = v.args[0], self.shape.tile, self.lanes
        depth, columns, home = left.width, v.width, self.plan.home(v)
        full, rest = divmod(depth, lanes)
        together = 1  # rows of W: their partial sums must fit the registers
        while 2 * together <= min(lanes, (self.shape.machine.registers - 6) // tile):
            together *= 2
        rows = [self._row_pointer(left, self._int(r)) for r in range(tile)]
        matrix = self._pointer(Buffer(Role.MATRIX, *v.index))

        def block(start: Any, count: int) -> None:
            lines = [
                self._gep(matrix, self._mul(self._add(start, self._int(min(i, count - 1))), pitch))
                for i in range(together)
            ]
            with self._accumulate(full, [[[self._splat(0.0)] * together for _ in range(tile)]]) as (k, sums):
                self._add_products(sums[0], rows, lines, self._mul(k, lanes), None)
            sums = self._accumulated
            if rest:
                self._add_products(sums[0], rows, lines, self._int(full * lanes), self._first(rest))
            for r in range(tile):
                mask = None if count == lanes else self._first(count)
                self._save(self._summed(sums[0][r]), self._at(home, self._int(r), start), mask)

        self._writes(home, columns)
        blocks = columns // together
        if blocks > 1:
            with self._range(self._int(0), self._int(blocks), 1) as i:
                block(self._mul(i, together), together)
        elif blocks:
            block(self._int(0), together)
        if columns % together:
            block(self._int(blocks * together), columns % together)

    def _add_products(self, sums: list[list[Any]], rows: list[Any], lines: list[Any], k: Any, mask: Any) -> None:
        """Of `lanes` numbers from k on, of every row with every row of W."""
        found = [self._load(self._gep(line, k), mask) for line in lines]
        for r, row in enumerate(rows):
            numbers = self._load(self._gep(row, k), mask)
            sums[r] = [self._call("fma", numbers, line, total) for line, total in zip(found, sums[r], strict=True)]

    def _summed(self, vectors: list[Any]) -> Any:
        """A vector whose first numbers are the sums of 2ⁱ vectors, each over its lanes: they are folded in pairs."""
        size = self.lanes  # how many numbers in a row belong to one sum
        while size > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=True) if len(vectors) > 1 else [(vectors[0], vectors[0])]
            low = [at + i for at in range(0, 2 * self.lanes, size) for i in range(size // 2)]
            first, second = (
                ir.Constant(ir.VectorType(self.i32, self.lanes), [i + shift for i in low]) for shift in (0, size // 2)
            )
            shuffle = self.b.shuffle_vector
            vectors = [self.b.fadd(shuffle(a, c, first), shuffle(a, c, second)) for a, c in pairs]
            size //= 2
        return vectors[0]
