"""CUDA code for products: weights that stay where they are, rows that come from the exchange, sums that warps share."""

from loopfold.engines.cuda_plan import TILE, Piece, Product
from loopfold.engines.cuda_values import Values
from loopfold.engines.writing import Role

LOADS = 8  # of 16 bytes, that a thread has under way
MANY_BLOCKS = 16  # whose looking at an exchange slows its writers down


class Products(Values):
    """Products with matrices, by the tensor cores: 16 features × 8 sequences at a time.

    Lane 4·gq + tq of a warp holds weights of features gq and gq + 8, and loads 16 bytes of the row of sequence gq. In
    which order the sum over k is taken does not matter, so what a lane loads at once is what it multiplies at once.
    """

    def product(self, product: Product) -> None:
        """Load rows, wait for what is missing, multiply; then leave the warp's sums in shared memory."""
        j, x, body = product.index, product.exchange, self.body
        self._index_functions(product)
        self._weights(product)
        first = product.start // self.plan.per_chunk
        body.append(f"{{ // product {j}: {product.value.args[0].width} × {product.features}")
        if self.waits:
            self.once.append(f"u32 delay{j} = 0;")
            body.append(f"wait_until(since, delay{j} / 16);")
        body.append(f"const int chunk0 = wk{j} * {product.chunks_of_warp};")
        kind = "const u32" if self.alone else "const char*"
        body.append(f"{kind} from = {self.slot(x, 'it')} + (chunk0 + {first}) * {self.plan.chunk_bytes};")
        for begin in range(0, self.geometry.rows // TILE, 2):
            tiles = range(begin, min(self.geometry.rows // TILE, begin + 2))
            several = 2 if product.tiles_of_warp * len(tiles) < 4 else 1  # sums that need not wait for each other
            several *= 3 if self.plan.exact and several > 1 else 1
            body.append(f"{{ float c[{several}][{product.tiles_of_warp}][{len(tiles)}][4] = {{}};")
            count = max(1, LOADS // len(tiles))
            batches = [
                range(a, min(product.chunks_of_warp, a + count)) for a in range(0, product.chunks_of_warp, count)
            ]
            self._load(product, batches[0], tiles)
            for batch, following in zip(batches, [*batches[1:], range(0)], strict=True):
                self._load(product, following, tiles)
                if not self.alone:
                    self._wait(product, batch, tiles, learns=batch.start == begin == 0)
                for i in batch:
                    self._multiply(product, i, len(tiles), several)
            self._leave_sums(product, tiles, several)
        body.append("}")

    def _source(self, product: Product, i: int, tile: int) -> str:
        """Where a lane loads from, of chunk i of its warp."""
        at = f"from + {tile * product.exchange.chunks * self.plan.chunk_bytes + i * self.plan.chunk_bytes}"
        at += f" + lane_{product.index}(chunk0 + {i}, gq, tq)"
        return f"shared16({at})" if self.alone else f"exchanged16({at})"

    def _load(self, product: Product, batch: range, tiles: range) -> None:
        per_chunk = self.plan.per_chunk
        over = product.chunks_of_warp * product.warps_k != product.chunks
        ragged = over or any(piece.value.width % per_chunk for piece in product.exchange.pieces)
        for i in batch:
            for k, tile in enumerate(tiles):
                there = [f"depth_{product.index}(chunk0 + {i}, tq * {self.plan.per_load}) >= 0"] if ragged else []
                there += [f"{tile * TILE} + gq < rows"] if not (self.alone or self.whole) else []
                nothing = f"!({' && '.join(there)}) ? make_uint4(0, 0, 0, 0) : " if there else ""  # nobody writes it
                self.body.append(f"uint4 b{i}_{k} = {nothing}{self._source(product, i, tile)};")

    @property
    def waits(self) -> bool:
        """Whether a warp waits before it looks for words that other blocks write."""
        return self.geometry.blocks >= MANY_BLOCKS

    def _wait(self, product: Product, batch: range, tiles: range, learns: bool) -> None:
        loads = [(f"b{i}_{k}", self._source(product, i, tile)) for i in batch for k, tile in enumerate(tiles)]
        waits = " | ".join(f"missing({b})" for b, _ in loads)
        self.body.append(f"{{ u32 looks = 0; while (({waits}) && WAIT(looks)) {{ YIELD")
        self.body += [f"  if (missing({b})) {b} = {again};" for b, again in loads]
        self.body.append("}")
        if learns and self.waits:
            self.body.append(f"delay{product.index} = learnt(delay{product.index}, in_any_lane(looks));")
        self.body.append("} __syncwarp();")

    def _multiply(self, product: Product, i: int, tiles: int, several: int) -> None:
        j, kept, body = product.index, product.in_registers, self.body
        for half, words in enumerate((("x", "y"), ("z", "w"))):
            rows = [[f"b{i}_{k}.{word}" for word in words] for k in range(tiles)]
            if self.rounds:
                rows = [[f"tf32({word})" for word in pair] for pair in rows]
            body.append("{")
            if self.plan.exact:
                body += [f"  const u32 high{k}[2] = {{high({x}), high({y})}};" for k, (x, y) in enumerate(rows)]
                body += [f"  const u32 low{k}[2] = {{low({x}), low({y})}};" for k, (x, y) in enumerate(rows)]
            for m in range(product.tiles_of_warp):
                weights = f"w{j}[{(m * kept + i) * 2 + half}]"
                body.append("  {")
                if i >= kept:
                    at = self._in_shared(product, str(m), str(i), str(half))
                    body.append(f"  const uint4 q = shared16(base + {at}); const u32 w[4] = {{q.x, q.y, q.z, q.w}};")
                    weights = "w"
                if self.plan.exact:
                    rest = f"low_{weights}"
                    if not product.split:
                        parts = [", ".join(f"{part}({weights}[{n}])" for n in range(4)) for part in ("high", "low")]
                        body.append(f"  const u32 h[4] = {{{parts[0]}}}, l[4] = {{{parts[1]}}};")
                        weights, rest = "h", "l"
                for k, (x, y) in enumerate(rows):
                    factors = [(weights, x, y)]
                    if self.plan.exact:
                        high, low = (f"high{k}[0]", f"high{k}[1]"), (f"low{k}[0]", f"low{k}[1]")
                        factors = [(rest, *high), (weights, *low), (weights, *high)]
                    for n, (w, x, y) in enumerate(factors):
                        c = f"c[{(half * len(factors) + n) % several}][{m}][{k}]"
                        body.append(f"  multiply_add({c}, {w}, {x}, {y});")
                body.append("  }")
            body.append("}")

    @property
    def rounds(self) -> bool:
        """Whether numbers of float32 are rounded to TF32; the tensor cores alone would cut them off."""
        return self.plan.bytes == 4 and not self.plan.exact

    def _in_shared(self, product: Product, m: str, i: str, half: str) -> str:
        """Where weights lie that do not fit the registers: bytes from the start of shared memory."""
        rest = product.chunks_of_warp - product.in_registers
        at = f"((warp * {product.tiles_of_warp} + {m}) * {rest} + {i} - {product.in_registers}) * 2 + {half}"
        return f"{product.weights_at} + (({at}) * 32 + lane) * 16"

    def _leave_sums(self, product: Product, tiles: range, several: int) -> None:
        j, stride = product.index, product.stride
        self.body.append(f"#pragma unroll\nfor (int m = 0; m < {product.tiles_of_warp}; ++m) {{")
        self.body.append(f"const int tile = wm{j} * {product.tiles_of_warp} + m; if (tile < {product.tiles}) {{")
        for k, tile in enumerate(tiles):
            row = f"(wk{j} * {self.geometry.rows} + {tile * TILE} + 2 * tq) * {stride}"
            at = f"turn * {self.plan.sum_floats} + {product.sums_at} + {row} + tile * 16 + gq"
            self.body.append(f"const u32 d{k} = sums + ({at}) * 4;")
            for q, offset in enumerate((0, stride, 8, stride + 8)):
                value = " + ".join(f"c[{s}][m][{k}][{q}]" for s in range(several))
                self.body.append(f"to_shared4(d{k} + {offset * 4}, __float_as_uint({value}));")
        self.body.append("} } }")

    def take_sums(self, product: Product) -> None:
        """What each thread needs of a product: the warps' sums, added up."""
        row = product.value
        for (start, w), column in product.columns.items():
            part = row if w == row.width else self.plan.builder.make("slice", row, width=w, index=start)
            for n in self.own(w):
                at, total = self.new(), self.new()
                place = f"turn * {self.plan.sum_floats} + {product.sums_at + column} + r_{n} * {product.stride} + l_{n}"
                self.body.append(f"const u32 {at} = sums + ({place}) * 4; float2 {total} = shared8({at});")
                for k in range(1, product.warps_k):
                    more = f"shared8({at} + {k * self.geometry.rows * product.stride * 4})"
                    self.body.append(f"{{ const float2 q = {more}; {total}.x += q.x; {total}.y += q.y; }}")
                self.is_now(part, n, (f"{total}.x", f"{total}.y"))
        if self.waits:
            self.body.append("since = cycles();")

    def _index_functions(self, product: Product) -> None:
        """The column of the matrix that is feature f of this block; its row that is place k of chunk c; -1: none."""
        j, x, plan = product.index, product.exchange, self.plan
        lines = [f"DEV int column_{j}(int f, int p) {{"]
        for (start, w), first in product.columns.items():
            share = plan.share(w)
            lines.append(f"  if (f < {first + share}) {{ const int u = p * {share} + f - {first};")
            lines.append(f"    return f >= {first} && u < {w} ? {start} + u : -1; }}")
        lines += ["  return -1;", "}", f"DEV int depth_{j}(int c, int k) {{"]
        operand = product.value.args[0]
        pieces = x.pieces if operand.width == x.row.width else [Piece(0, operand)]
        for piece in reversed(pieces):
            first = x.first_chunk[piece.start] if pieces is x.pieces else 0
            lines.append(f"  if (c >= {first}) {{ k += (c - {first}) * PER_CHUNK;")
            lines.append(f"    return c < {product.chunks} && k < {piece.value.width} ? {piece.start} + k : -1; }}")
        lines += ["  return -1;", "}", f"DEV u32 lane_{j}(int c, int gq, int tq) {{"]
        for piece in reversed(x.pieces):  # where a lane's 16 bytes begin in a chunk
            own, load = plan.owner_part(piece.value.width), plan.per_load
            at = f"(tq * {load} / {own} * 8 + gq) * {own * plan.bytes} + tq * {load} % {own} * {plan.bytes}"
            lines.append(f"  if (c + {product.start // plan.per_chunk} >= {x.first_chunk[piece.start]}) return {at};")
        self.functions += [*lines, "  return 0;", "}"]

    def _weights(self, product: Product) -> None:
        """The columns of the matrix that this block needs, in the order in which the tensor cores take them."""
        j, kept, tiles = product.index, product.in_registers, product.tiles_of_warp
        rest = product.chunks_of_warp - kept
        matrix = self.buffer(Role.CONSTANT, product.value.index[0])
        load, step, words = ("given2", 4, 2) if self.plan.bytes == 2 else ("given4", 2, 1)
        at = f"{matrix} + ((k < 0 ? 0 : k) * A.stride_k[{j}] + (f < 0 ? 0 : f) * A.stride_f[{j}]) * {self.plan.bytes}"
        one = f"weight_{j}(A, {matrix}, chunk, k + (part >> 1) * {words}, part & 1 ? f1 : f0)"
        if self.plan.bytes == 2:
            one += f" | weight_{j}(A, {matrix}, chunk, k + (part >> 1) * {words} + 1, part & 1 ? f1 : f0) << 16"
        if self.rounds:
            one = f"tf32({one})"
        self.functions += [  # loads that wait for no condition, and for each other least of all: memory is far away
            f"DEV u32 weight_{j}(const Args& A, const char* {matrix}, int chunk, int k_, long long f) {{",
            f"  const long long k = depth_{j}(chunk, k_); const u32 w = {load}({at}); return k < 0 || f < 0 ? 0u : w;",
            "}",
            f"OUTLINED uint4 weights_{j}(const Args& A, const char* {matrix}, int chunk, int k, int f0, int f1) {{",
            "  u32 q[4];",
            "#pragma unroll",
            f"  for (int part = 0; part < 4; ++part) q[part] = {one};",
            "  return make_uint4(q[0], q[1], q[2], q[3]);",
            "}",
        ]
        at = f"[(m * {kept} + i) * 2 + s][part]"
        put = f"w{j}{at} = high(q[part]), low_w{j}{at} = low(q[part]);" if product.split else f"w{j}{at} = q[part];"
        to_registers = f"for (int part = 0; part < 4; ++part) {put}"
        to_shared = f"*(uint4*)(shared + {self._in_shared(product, 'm', 'i', 's')}) = loaded;"
        self.once += [
            *(f"u32 {low}w{j}[{max(1, tiles * kept * 2)}][4];" for low in (["", "low_"] if product.split else [""])),
            f"const int wm{j} = warp / {product.warps_k}, wk{j} = warp % {product.warps_k};",
        ]
        for begin, end, unroll, keep in ((0, kept, "#pragma unroll", to_registers), (kept, kept + rest, "", to_shared)):
            if begin == end:
                continue
            self.once += [
                unroll,
                f"for (int m = 0; m < {tiles}; ++m) {{",
                f"  const int tile = wm{j} * {tiles} + m, f = tile * 16 + gq;",
                f"  const int f0 = tile < {product.tiles} ? column_{j}(f, p) : -1;",
                f"  const int f1 = tile < {product.tiles} ? column_{j}(f + 8, p) : -1;",
                unroll,
                f"  for (int i = {begin}; i < {end}; ++i) {{",
                unroll,
                "    for (int s = 0; s < 2; ++s) {",
                f"      const int chunk = wk{j} * {product.chunks_of_warp} + i;",
                f"      const int k = tq * {self.plan.per_load} + {step} * s;",
                f"      const uint4 loaded = weights_{j}(A, {matrix}, chunk, k, f0, f1);",
                "      const u32 q[4] = {loaded.x, loaded.y, loaded.z, loaded.w};",
                f"      {keep}",
                "    }",
                "  }",
                "}",
            ]
