"""JavaScript: a step as one ES module without dependencies, for a browser, node, or any other place that runs it."""

import base64
import json
import math
import re

import torch

from loopfold.errors import Argument, OptionError
from loopfold.exporting.program import StepProgram
from loopfold.exporting.texts import Texts
from loopfold.exporting.writing import Writer, indented, single
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS
from loopfold.text.vocabulary import UNSPACED

_FUNCTIONS = {
    "product": """\
function loopfold_product(x, w, at, rows, columns, y) {
  y.fill(0);
  let i = 0;
  for (; i + 4 <= rows; i += 4) {
    const m = at + i * columns, a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
    for (let j = 0, k = m; j < columns; j++, k++)
      y[j] += a * w[k] + b * w[k + columns] + c * w[k + 2 * columns] + d * w[k + 3 * columns];
  }
  for (; i < rows; i++) for (let j = 0; j < columns; j++) y[j] += x[i] * w[at + i * columns + j];
}
""",
    "rows": """\
function loopfold_rows(which, many, w, at, count, width, y) {
  for (let i = 0; i < many; i++) {
    const k = at + Math.min(Math.max(Math.trunc(which[i]) || 0, 0), count - 1) * width;
    for (let j = 0; j < width; j++) y[i * width + j] = w[k + j];
  }
}
""",
    "take": """\
function loopfold_take(x, from, width, y) {
  for (let i = 0; i < width; i++) y[i] = from[i] < 0 ? 0 : x[from[i]];
}
""",
    "rint": """\
function rint(x) {  // halves to even
  const r = Math.round(x);
  return Math.abs(x % 1) === 0.5 && r % 2 ? r - 1 : r;
}
""",
    "erf": """\
function erf(x) {
  return Math.abs(x) < 2 ? series(x) : Math.sign(x) * (1 - tail(Math.abs(x)));
}
""",
    "erfc": """\
function erfc(x) {
  return Math.abs(x) < 2 ? 1 - series(x) : x < 0 ? 2 - tail(-x) : tail(x);
}
""",
    "series": """\
function series(x) {  // of the error function, near zero
  let term = x, sum = x;
  for (let n = 1; n < 60; n++) {
    term *= (-x * x) / n;
    sum += term / (2 * n + 1);
  }
  return (2 / Math.sqrt(Math.PI)) * sum;
}
""",
    "tail": """\
function tail(x) {  // 1 - erf(x) far from zero, as a continued fraction
  if (x !== x || x > 30) return x !== x ? x : 0;
  let f = x;
  for (let n = 60; n > 0; n--) f = x + n / 2 / f;
  return Math.exp(-x * x) / f / Math.sqrt(Math.PI);
}
""",
    "rounded": """\
function rounded(x, digits, least, beyond) {  // to so many binary digits after the first
  if (x === 0 || x - x !== 0) return x;
  if (Math.abs(x) >= beyond) return x * Infinity;
  const unit = 2 ** (Math.max(Math.floor(Math.log2(Math.abs(x))), least) - digits);
  return rint(x / unit) * unit;
}
""",
}
_NEEDS = {"erf": ("series", "tail"), "erfc": ("series", "tail"), "rounded": ("rint",)}
# Where JavaScript says it otherwise than C
_MATH = "tanh exp expm1 log log1p sqrt sin cos tan sinh cosh log2 log10 floor ceil trunc atan asinh abs"
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

    def __init__(self, program: StepProgram, texts: Texts | None) -> None:
        self.made: list[str] = []  # rows that every step needs, once
        super().__init__(program, texts)

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

    def source(self, half: bool) -> str:
        """The module; `half`: its weights have 16 bits each."""
        program, texts = self.program, self.texts
        data = program.numbers()
        if half and bool((data.isfinite() & ~data.half().isfinite()).any()):
            raise OptionError(Argument("half"), f" cannot hold {data[data.isfinite()].abs().max():.3g}: leave it out.")
        packed = data.to(torch.float16 if half else torch.float32).numpy().tobytes()
        text = "\n".join(self.body)
        used = [name for name in _FUNCTIONS if re.search(rf"\b(loopfold_)?{name}\(", text)]
        used += [need for name in used for need in _NEEDS.get(name, ())]
        state = ", ".join(f"{field}: state{i}" for i, field in enumerate(self.fields))
        reset = [
            f"state{i}.set(w.subarray({at}, {at + leaf.size}));"
            for i, (at, leaf) in enumerate(zip(self.starts, program.state, strict=True))
        ]
        reset += ["count = 0;"] if program.counts else []
        reset += [f"last = {texts.size};"] if texts else []
        lines = [
            f"// One step of {program.name}, made by Loopfold. In a module:",
            "//",
            "//   import { create } from './FILE.js'",
            "//   const model = create()",
            f"//   const output = model.step({', '.join(self.names)})  // moves the state on",
            "//   model.reset()  // back to the state before the first step",
            *(["//   model.generate('a prompt', 100, { temperature: 0.8, topK: 0 })"] if texts else []),
            "",
            *[_FUNCTIONS[name] for name in dict.fromkeys(used)],
            "function check(holds, message) {",
            "if (!holds) throw new RangeError(message);",
            "}",
            "",
            _WEIGHTS.replace("HALF", "true" if half else "false"),
            *[f"const {name} = [{', '.join(map(str, places))}];" for name, places in self.indices],
            "export function create(weights = decoded()) {",
            f"check(weights.length === {self.size}, `weights must be {self.size} numbers; got ${{weights.length}}`);",
            "const w = weights;",
            *self._buffers(),
            *self.made,
            *(["let count = 0;"] if program.counts else []),
            *(["let last = 0;"] if texts else []),
            "",
            "function reset() {",
            *reset,
            "}",
            "",
            f"function step({', '.join(self.names)}) {{",
            *self._step(),
            "return output;",
            "}",
            "",
            *(_GENERATE.splitlines() if texts else []),
            "reset();",
            f"return {{ step, reset, state: {{ {state} }}{', generate' if texts else ''} }};",
            "}",
            "",
            *([_reading(texts)] if texts else []),
            f'const data = "{base64.b64encode(packed).decode()}";',
        ]
        return indented(lines, "  ")

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
                    f"`x must be {leaf.size} numbers; got ${{{name}?.length}}`",
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
        return [*begin, *self.body, *end]


_WEIGHTS = """function decoded() {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  if (!HALF) return new Float32Array(bytes.buffer);
  const bits = new Uint16Array(bytes.buffer), numbers = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const sign = bits[i] & 0x8000 ? -1 : 1, exponent = (bits[i] >> 10) & 31, rest = bits[i] & 1023;
    numbers[i] = sign * (exponent === 31 ? (rest ? NaN : Infinity)
      : exponent ? (1 + rest / 1024) * 2 ** (exponent - 15) : rest * 2 ** -24);
  }
  return numbers;
}
"""

_GENERATE = """// Read a prompt, text or tokens, then write so many tokens; the next call goes on from there.
function generate(prompt, length = 200, { temperature = 1, topK = 0, random = Math.random } = {}) {
const written = [], read = typeof prompt === "string" ? encode(prompt) : prompt;
for (let i = 0; i < read.length + length; i++) {
const output = step(last);
last = i < read.length ? read[i] : pick(output, temperature, topK, random);
if (i >= read.length) written.push(last);
}
return typeof prompt === "string" ? decode(written, read) : written;
}
"""

_PICK = """// A token, drawn with a temperature (0: the likeliest) from the topK likeliest (0: all).
export function pick(output, temperature = 1, topK = 0, random = Math.random) {
  const places = [...output.keys()].filter((i) => i !== unknown).sort((i, j) => output[j] - output[i]);
  if (!(temperature > 0)) return places[0];
  const kept = topK > 0 ? places.slice(0, topK) : places;
  const shares = kept.map((i) => Math.exp((output[i] - output[kept[0]]) / temperature));
  let left = random() * shares.reduce((a, b) => a + b, 0);
  for (let i = 0; i < kept.length; i++) if ((left -= shares[i]) < 0) return kept[i];
  return kept[kept.length - 1];
}
"""


# White space in Python
_SPACE = r"\t-\r\x1c-\x20\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"


def _reading(texts: Texts) -> str:
    """The functions that read and write text."""
    tokens = json.dumps([base64.b64encode(token).decode() for token in texts.tokens])
    unspaced = re.sub(r"\\U000([0-9a-f]{5})", r"\\u{\1}", UNSPACED.encode("unicode_escape").decode())
    word = f"/[{unspaced}]|[^{_SPACE}{unspaced}]+/gu" if texts.unspaced else f"/[^{_SPACE}]+/gu"
    encode = _ENCODE[texts.unit].replace("WORD", word).replace("UNSPACED", unspaced)
    encode = encode.replace("APART", "true" if texts.unspaced else "false")
    return f"""{_PICK}
const unknown = {"null" if texts.unknown is None else texts.unknown};
const utf8 = new TextDecoder("utf-8", {{ ignoreBOM: true }});
const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const tokenBytes = {tokens}.map(bytesOf);
const texts = tokenBytes.map((bytes) => utf8.decode(bytes));

// The text of each token
export {{ texts }};

{encode}"""


_CHARACTERS = """const numbers = new Map(texts.map((text, i) => [text, i]));
export function encode(text) {
  return [...text].map((c) => {
    check(numbers.get(c) > 0, `the model has never seen ${JSON.stringify(c)}`);
    return numbers.get(c);
  });
}
export function decode(tokens) {
  return tokens.map((i) => texts[i]).join("");
}
"""
_BYTES = """export function decode(tokens) {
  const bytes = tokens.flatMap((i) => [...tokenBytes[i]]);
  return utf8.decode(Uint8Array.from(bytes));
}
"""
_ENCODE = {
    "character": _CHARACTERS,
    "byte": "export function encode(text) {\n  return [...new TextEncoder().encode(text)];\n}\n" + _BYTES,
    "subword": """export function encode() {
  throw new Error("subwords are made by a program of their own: give the prompt as tokens");
}
"""
    + _BYTES,
    "word": """\
const numbers = new Map(texts.map((text, i) => [text, i]).slice(2)).set("<unk>", 0).set("<eos>", 1);
const alone = /^[UNSPACED]/u;
// What stands between white space, as Python has it; a line that is over ends in a token of its own
export function encode(text) {
  const lines = text.split("\\n").map((line) => [...line.matchAll(WORD)].map((word) => numbers.get(word[0]) ?? 0));
  return lines.flatMap((line, i) => (i < lines.length - 1 ? [...line, 1] : line));
}
function tight(a, b) {
  const lone = [a, b].map((word) => APART && alone.test(word));
  return lone.includes(true) && [a, b].every((word, i) => lone[i] || !/[\\p{L}\\p{N}]/u.test(word));
}
export function decode(tokens, before = []) {
  let last = before.length ? texts[before[before.length - 1]] : "\\n";
  return tokens.map((i) => {
    const word = texts[i], space = last === "\\n" || word === "\\n" || tight(last, word) ? "" : " ";
    last = word;
    return space + word;
  }).join("");
}
""",
}
