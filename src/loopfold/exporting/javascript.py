"""JavaScript: a step as one ES module without dependencies, for a browser, node, or any other place that runs it."""

import base64
import json
import math
import re
from itertools import accumulate
from typing import Any

from loopfold.errors import Argument, OptionError
from loopfold.exporting.javascript_parts import (
    FUNCTIONS,
    GENERATE,
    HOW_BACK,
    NEEDS,
    NUMBERS,
    TIE,
    WEIGHTS,
    named,
    reading,
)
from loopfold.exporting.labels import Labels
from loopfold.exporting.places import Places
from loopfold.exporting.program import Schedule, StepProgram
from loopfold.exporting.texts import Texts
from loopfold.exporting.writing import Writer, indented, single
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS

# Where JavaScript says it otherwise than C
_MATH = "tanh exp expm1 log log1p log2 log10 sqrt abs floor ceil trunc"
_MATH += " sin cos tan asin acos atan sinh cosh asinh acosh atanh"
_OWN = {name: f"Math.{name}({{0}})" for name in _MATH.split()} | {
    "sigmoid": "1 / (1 + Math.exp(-{0}))",
    "rsqrt": "1 / Math.sqrt({0})",
    "exp2": "2 ** {0}",
    "fmod": "{0} % {1}",
    "atan2": "Math.atan2({0}, {1})",
    "pow": "Math.pow({0}, {index})",
    "power": "{0} === 1 ? 1 : Math.pow({0}, {1})",
    "round": "rint({0})",
    "erf": "erf({0})",
    "erfc": "erfc({0})",
    "bfloat16": f"rounded({{0}}, 7, -126, {(2 - 2.0**-8) * 2.0**127!r})",
    "float16": "rounded({0}, 10, -14, 65520)",
}


class JavaScriptWriter(Writer):
    variable, constant, truth = "let", "const", "const"

    def __init__(
        self,
        program: StepProgram,
        texts: Texts | None,
        backward: bool = False,
        watched: bool = False,
        parameters: Places | None = None,
    ) -> None:
        """`backward`: with the reverse step; `watched`: with a graph of its operations, and the value of each.

        `parameters`: where those of the model are, for weights that are trained.
        """
        self.watched, self.parameters = watched, parameters
        self.ties = parameters.ties if parameters is not None and backward else []
        self.fixed = [[*pair] for pair in parameters.fixed] if parameters is not None else []
        self.made: list[str] = []  # rows that every step needs, once
        self.backward = backward
        super().__init__(program, texts)
        self.back = self._back() if backward else []

    def forward(self) -> Schedule:
        schedule = self.program.forward_and_kept if self.backward else self.program.forward
        return Schedule((*schedule.roots, *self.operations)) if self.watched else schedule

    def expression(self, op: str) -> str:
        return _OWN.get(op, OPS[op].c)

    def rounded(self, v: Value, what: str) -> str:
        return what if v.is_bool else f"Math.fround({what})"

    def literal(self, number: float) -> str:
        number = single(number)
        if math.isfinite(number):
            return repr(number)
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"

    def loop_of(self, index: str, count: int) -> str:
        return f"for (let {index} = 0; {index} < {count}; {index}++) {{"

    def declare(self, name: str, width: int) -> None:
        self.made.append(f"const {name} = new Float32Array({width});")

    def alias(self, name: str, row: str, start: int) -> None:
        self.made.append(f"const {name} = {row}.subarray({start});")

    def copy(self, row: str, width: int, into: str, at: int) -> None:
        self.lines.append(f"for (let i = 0; i < {width}; i++) {into}[{at} + i] = {row}[i];")

    def weight(self, offset: int) -> str:
        return f"w, {offset}"

    def constant_row(self, index: int, width: int) -> str:
        at, name = self.offsets[index], f"c{index}"
        made = f"const {name} = w.subarray({at}, {at + width});"
        if made not in self.made:
            self.made.append(made)
        return name

    # ---- the file

    def source(self, bits: int = 32) -> str:
        """The module; its weights have 16, 24 or 32 `bits` each, where 24 are those of float32 without the lowest 8."""
        program, texts = self.program, self.texts
        data = program.numbers()
        if bits == 16 and bool((data.isfinite() & ~data.half().isfinite()).any()):
            raise OptionError(Argument("half"), f" cannot hold {data[data.isfinite()].abs().max():.3g}: leave it out.")
        numbers = data.numpy().astype("<f2" if bits == 16 else "<f4")
        packed = numbers.view("u1").reshape(-1, numbers.itemsize)[:, -(bits // 8) :].tobytes()
        lines = [
            f"// One step of {program.name}, made by Loopfold. In a module:",
            "//",
            "//   import { create } from './FILE.js'",
            "//   const model = create()",
            f"//   const output = model.step({', '.join(self.names)})  // moves the state on",
            "//   model.reset()  // back to the state before the first step",
            "//   const here = model.save()  // and later model.restore(here)",
            *(["//   model.generate('a prompt', 100, { temperature: 0.8, topK: 0 })"] if texts else []),
            *(HOW_BACK if self.backward else []),
            "",
            *[FUNCTIONS[name] for name in self.functions()],
            WEIGHTS.replace("NUMBERS", NUMBERS[bits]),
            *self.places(),
            *self.creator("export function create(weights = decoded())"),
            "",
            *([reading(texts)] if texts else []),
            *([named(self.parameters)] if self.parameters is not None else []),
            *(
                [f"// What a step computes, in the order of `values`\nexport const graph = {self._graph()};"]
                * self.watched
            ),
            f'const data = "{base64.b64encode(packed).decode()}";',
        ]
        return indented(lines, "  ")

    def functions(self) -> list[str]:
        """Those that the code calls, by name, each after those that it needs itself."""
        text = "\n".join([*self.body, *self.back])
        used = [name for name in FUNCTIONS if re.search(rf"\b(loopfold_)?{name}\(", text)]
        return [*dict.fromkeys([*used, *(need for name in used for need in NEEDS.get(name, ())), "check"])]

    def places(self) -> list[str]:
        """Where what is put elsewhere stood."""
        lines = [f"const {name} = [{', '.join(map(str, places))}];" for name, places in self.indices]
        return lines + ([f"const ties = {json.dumps(self.ties, separators=(',', ':'))};"] if self.ties else [])

    def creator(self, head: str) -> list[str]:
        """The function that makes a model of weights."""
        program, texts = self.program, self.texts
        reset = [
            f"state{i}.set(w.subarray({at}, {at + leaf.size}));"
            for i, (at, leaf) in enumerate(zip(self.starts, program.state, strict=True))
        ]
        reset += ["count = 0;"] if program.counts else []
        reset += [f"last = {texts.size};"] if texts else []
        kept = ["count"] * program.counts + ["last"] * (texts is not None)
        states = ", ".join(f"state{i}.slice()" for i in range(len(self.fields)))
        fields = ", ".join(f"{field}: state{i}" for i, field in enumerate(self.fields))
        gives = ["step", "reset", "save", "restore", f"state: {{ {fields} }}"]
        gives += ["generate"] if texts else []
        gives += ["unfold", "backward"] if self.backward else []
        row = self._row()
        gives += ["row"] if row else []
        watched = ", ".join(f"{self.row(v)}.subarray(0, {v.width})" for v in self.operations if self.watched)
        gives += [f"values: [{watched}]"] if self.watched else []
        return [
            f"{head} {{",
            f"check(weights.length === {self.size}, `weights must be {self.size} numbers; got ${{weights.length}}`);",
            "const w = weights;",
            *self._buffers(),
            *self.made,
            *(["let count = 0;"] if program.counts else []),
            *(["let last = 0;"] if texts else []),
            *(["let tape = new Float32Array(0), steps = 0, read = [], keeping = false;"] if self.backward else []),
            "",
            *(TIE.splitlines() if self.ties else []),
            "function reset() {",
            *(["tie();"] if self.ties else []),
            *reset,
            "}",
            "",
            f"function step({', '.join(self.names)}) {{",
            *self._step(),
            "return output;",
            "}",
            "",
            "// Where it stands: all that its next steps depend on.",
            "function save() {",
            f"return {{ {', '.join([f'state: [{states}]', *kept])} }};",
            "}",
            "",
            "function restore(saved) {",
            *[f"state{i}.set(saved.state[{i}]);" for i in range(len(self.fields))],
            *[f"{name} = saved.{name};" for name in kept],
            "}",
            "",
            *self.back,
            *row,
            *(GENERATE.splitlines() if texts else []),
            "reset();",
            f"return {{ {', '.join(gives)} }};",
            "}",
        ]

    def _buffers(self) -> list[str]:
        x = self.program.x
        widths = [
            table.shape[1] if table is not None else 1 if self.program.is_count(k) else x[k].size
            for k, table in self.program.inputs
        ]
        made = [f"const input{i} = new Float32Array({width});" for i, width in enumerate(widths)]
        return made + [f"const state{i} = new Float32Array({leaf.size});" for i, leaf in enumerate(self.program.state)]

    def _step(self) -> list[str]:
        begin = []
        for name, leaf in zip(self.names, self.program.x, strict=True):
            if leaf.tokens:
                holds = f"Number.isInteger({name}) && {name} >= 0 && {name} < {leaf.tokens}"
                said = f"`a token is a whole number from 0 to {leaf.tokens - 1}; got ${{{name}}}`"
            else:
                holds, said = (
                    f"{name}?.length === {leaf.size}",
                    f"`{name} must be {leaf.size} numbers; got ${{{name}?.length}}`",
                )
            begin.append(f"check({holds}, {said});")
        for i, (k, table) in enumerate(self.program.inputs):
            if table is not None:
                at = f"{self.table_at(i)} + {self.names[k]} * {table.shape[1]}"
                begin.append(f"input{i}.set(w.subarray({at}, {at} + {table.shape[1]}));")
            else:
                begin.append(
                    f"input{i}[0] = count++;" if self.program.is_count(k) else f"input{i}.set({self.names[k]});"
                )
        copies = [f"{row}.slice(0, {leaf.size})" for row, leaf in zip(self.gives, self.program.outputs, strict=True)]
        end = [f"const output = {copies[0] if len(copies) == 1 else '[' + ', '.join(copies) + ']'};"]
        end += [f"state{i}.set({row}.subarray(0, {self.program.state[i].size}));" for i, row in self.moves.items()]
        return [*begin, *self.body, *(["if (keeping) keep();"] if self.backward else []), *end]

    # ---- the reverse step

    def _back(self) -> list[str]:
        """The functions of back-propagation through time."""
        program, reverse = self.program, self.program.reverse
        emitted, carried = program.loop.emitted, program.loop.carried
        kept = [v for v in program.kept if self.root(v).op != "constant"]
        places = [*accumulate((v.width for v in kept), initial=0)]
        size = places.pop()
        rows = [*zip(kept, map(self.row, kept), places, strict=True)]
        self.made += [f"const carry{k} = new Float32Array({emitted[k].width});" for k in range(len(carried))]
        self.made += [f"const incoming{k} = new Float32Array({v.width});" for k, v in enumerate(emitted)]
        self.made.append("const one = [1];")
        body = self._written(program.backward)
        self._sums()
        after = [self._given(f"back{k}", g) for k, g in enumerate(reverse.carries)]
        self.lines += [f"carry{k}.set({row}.subarray(0, {emitted[k].width}));" for k, row in enumerate(after)]
        of = {i: k for k, i in enumerate(carried)}
        states = [f"carry{of[i]}.slice()" if i in of else f"new Float32Array({leaf.size})"
                  for i, leaf in enumerate(program.state)]  # fmt: skip
        numbers = [f"x{k}" for k in range(len(program.x))]
        made = [f"const x{k} = new Float32Array({self._read_width(k)});" for k in range(len(program.x))]
        several = len(program.gives) > 1
        incoming = [f"loopfold_add(gradients[t]{f'?.[{j}]' if several else ''}, incoming{k}, {emitted[k].width});"
                    for j, k in enumerate(program.gives)]  # fmt: skip
        last = [f"loopfold_add(last.{field}, incoming{k}, {emitted[k].width});"
                for field, k in zip(self.fields, program.after, strict=True)]  # fmt: skip
        start = [
            f"if (weights) loopfold_outer(one, 1, carry{of[i]}, {leaf.size}, weights, {at});"
            for i, (leaf, at) in enumerate(zip(program.state, self.starts, strict=True))
            if i in of and program.learned[i]
        ]
        return [
            "function keep() {",
            f"const at = {size} * steps++;",
            f"if (at + {size} > tape.length) {{",
            "const old = tape;",
            f"tape = new Float32Array(2 * (at + {size}));",
            "tape.set(old);",
            "}",
            *[f"for (let i = 0; i < {v.width}; i++) tape[at + {i} + i] = {row}[i];" for v, row, i in rows],
            "}",
            "",
            "function unfold(xs) {",
            *(["tie();"] if self.ties else []),
            "steps = 0;",
            "keeping = true;",
            "try {",
            "read = Array.from(xs);",
            f"return read.map((x) => step({'...x' if len(program.x) > 1 else 'x' if program.x else ''}));",
            "} finally {",
            "keeping = false;",
            "}",
            "}",
            "",
            f"function backward(gradients, last = null, weights = new Float32Array({self.size})) {{",
            "check(gradients.length === steps, `got gradients for ${gradients.length} steps; ${steps} were unfolded`);",
            *[f"carry{k}.fill(0);" for k in range(len(carried))],
            "const x = Array(steps), states = Array(steps);",
            *[f"const now{i} = state{i}.slice();" for i in range(len(program.state))],
            "for (let t = steps - 1; t >= 0; t--) {",
            f"const at = {size} * t;",
            *[f"incoming{k}.fill(0);" for k in range(len(emitted))],
            *incoming,
            "if (t === steps - 1 && last) {",
            *last,
            "}",
            *[f"for (let i = 0; i < {v.width}; i++) {row}[i] = tape[at + {i} + i];" for v, row, i in rows],
            *made,
            *body,
            f"x[t] = {numbers[0] if len(numbers) == 1 else '[' + ', '.join(numbers) + ']'};",
            f"states[t] = {{ {', '.join(f'{f}: {s}' for f, s in zip(self.fields, states, strict=True))} }};",
            "}",
            *start,
            *(["if (weights) untie(weights);"] if self.ties else []),
            *(
                [f"if (weights) for (const [from, to] of {self.fixed}) weights.fill(0, from, to);"]
                if self.fixed
                else []
            ),
            *[f"state{i}.set(now{i});" for i in range(len(program.state))],
            "return { x, states, weights };",
            "}",
            "",
        ]

    def _sums(self) -> None:
        """What a step adds to the gradients by the weights and by x."""
        program, reverse = self.program, self.program.reverse

        def add(g: Value, into: str) -> None:
            self.call("outer", "one", "1", self.row(g), str(g.width), into)

        read = [0] * (len(program.x) + program.counts)  # how much of what a token names stands in its gradient so far
        for (leaf, table), gradient in zip(program.inputs, reverse.inputs, strict=True):
            if gradient is not None and not program.is_count(leaf):
                add(gradient, f"x{leaf}, {read[leaf]}")
            read[leaf] += 0 if table is None else table.shape[1]
        for v in [*(g for _, g in reverse.rows), *(v for p in reverse.products for v in (p.left, p.right))]:
            self.row(v)  # made before the brace, for those after it
        self.lines.append("if (weights) {")
        for i, g in reverse.rows:
            add(g, f"weights, {self.offsets[i]}")
        for p in reverse.products:
            left, right, at = self.row(p.left), self.row(p.right), f"weights, {self.offsets[p.matrix]}"
            if p.rows is None:
                self.call("outer", left, str(p.left.width), right, str(p.right.width), at)
            else:
                each = p.right.width // p.left.width
                self.call("rows_back", left, str(p.left.width), right, str(each), at, str(p.rows))
        for i, ((leaf, table), gradient) in enumerate(zip(program.inputs, reverse.inputs, strict=True)):
            if gradient is not None and table is not None:
                token = f"read[t][{leaf}]" if len(program.x) > 1 else "read[t]"
                add(gradient, f"weights, {self.table_at(i)} + {token} * {gradient.width}")
        self.lines.append("}")

    def _read_width(self, k: int) -> int:
        """How many numbers leaf k of x is to the step: of a token, all that it names."""
        tables = [table.shape[1] for leaf, table in self.program.inputs if leaf == k and table is not None]
        return sum(tables) or self.program.x[k].size

    def _row(self) -> list[str]:
        """A function that gives what a token names, where a step reads one token."""
        if [bool(leaf.tokens) for leaf in self.program.x] != [True]:
            return []
        tables = [(self.table_at(i), table.shape[1]) for i, (_, table) in enumerate(self.program.inputs)
                  if table is not None]  # fmt: skip
        rows = [f"...w.subarray({at} + token * {n}, {at} + (token + 1) * {n})" for at, n in tables]
        head = ["// The numbers that a token stands for.", "function row(token) {"]
        return [*head, f"return Float32Array.of({', '.join(rows)});", "}", ""]

    # ---- what is inside

    @property
    def operations(self) -> list[Value]:
        """What a step computes, arguments first; a part of a row counts as the row."""
        return [v for v in self.program.forward.order if not v.is_leaf and v.op != "slice"]

    def _graph(self) -> str:
        """The operations as data: what each is called, how wide it is, and what it reads.

        `state` names the leaves of the state; `after` says which operation gives each of them, or what it stays, and
        `gives` the same of the outputs. `sources` is what each of `after`, then of `gives`, depends on without another
        state of the same step between.
        """
        labels = Labels(self.program)
        place = {v: i for i, v in enumerate(self.operations)}

        def name(v: Value) -> int | str | None:
            v = self.root(v)
            return place.get(v, f"{v.op}{v.index}" if v.op in ("state", "input") else None)

        rows: list[dict[str, Any]] = [
            {
                "label": labels.of(v),
                "width": v.width,
                "reads": [*dict.fromkeys(n for n in map(name, v.args) if n is not None)],
            }
            for v in self.operations
        ]
        emitted = self.program.loop.emitted
        after, gives = ([name(emitted[k]) for k in which] for which in (self.program.after, self.program.gives))

        def sources(root: int | str | None) -> list[int | str]:
            if not isinstance(root, int):
                return [] if root is None else [root]
            found: dict[int | str, None] = {}
            todo, seen = list(rows[root]["reads"]), {root}
            while todo:
                read = todo.pop(0)
                if isinstance(read, str) or read in after:
                    found[read] = None
                elif read not in seen:
                    seen.add(read)
                    todo += rows[read]["reads"]
            return [*found]

        reached = [*map(sources, after), *([root] if root in after else sources(root) for root in gives)]
        return json.dumps(
            {"operations": rows, "state": labels.states(), "after": after, "gives": gives, "sources": reached}
        )
