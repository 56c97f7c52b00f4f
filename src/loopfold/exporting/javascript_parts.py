"""JavaScript that is the same for every step: functions that its code calls, and reading and writing text."""

import base64
import json
import re

from loopfold.exporting.places import Places
from loopfold.exporting.texts import Texts
from loopfold.text.vocabulary import UNSPACED

FUNCTIONS = {
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
    "product_back": """\
function loopfold_product_back(y, w, at, rows, columns, x) {
  for (let i = 0; i < rows; i++) {
    let sum = 0;
    for (let j = 0, k = at + i * columns; j < columns; j++, k++) sum += y[j] * w[k];
    x[i] = sum;
  }
}
""",
    "outer": """\
function loopfold_outer(x, rows, y, columns, w, at) {
  for (let i = 0; i < rows; i++) {
    const a = x[i];
    for (let j = 0, k = at + i * columns; j < columns; j++, k++) w[k] += a * y[j];
  }
}
""",
    "rows_back": """\
function loopfold_rows_back(which, many, y, width, w, at, count) {
  for (let i = 0; i < many; i++) {
    const k = at + Math.min(Math.max(Math.trunc(which[i]) || 0, 0), count - 1) * width;
    for (let j = 0; j < width; j++) w[k + j] += y[i * width + j];
  }
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
    "add": """\
function loopfold_add(x, y, width) {
  if (x == null) return;
  check(x.length === width, `a gradient must be ${width} numbers; got ${x.length}`);
  for (let i = 0; i < width; i++) y[i] += x[i];
}
""",
    "check": """\
function check(holds, message) {
  if (!holds) throw new RangeError(message);
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
NEEDS: dict[str, tuple[str, ...]] = {"erf": ("series", "tail"), "erfc": ("series", "tail"), "rounded": ("rint",)}

HOW_BACK = [
    "//   const outputs = model.unfold(xs)  // a step for each x, and all that the way back needs is kept",
    "//   const { x, states, weights } = model.backward(gradients)",
    "//     gradients  of a loss, by the output of each step; null is zero",
    "//     x, states  its gradients by each x (of a token: by the row it names) and by the state before each step",
    "//     weights    and by the weights, as many numbers as create(weights) takes",
    "//   model.backward(gradients, last, weights)",
    "//     last       its gradients by the last state, such as model.state",
    "//     weights    an array to which those by the weights are added; null: they are not wanted",
    "//   named(weights)  an array by the names that the parameters have in torch",
]

WEIGHTS = """export function decoded() {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
NUMBERS
}
"""
NUMBERS = {  # by the bits of each
    32: "  return new Float32Array(bytes.buffer);",
    24: """  const bits = new Uint32Array(bytes.length / 3);
  for (let i = 0, at = 0; i < bits.length; i++, at += 3) {
    bits[i] = (bytes[at] << 8) | (bytes[at + 1] << 16) | (bytes[at + 2] << 24);
  }
  return new Float32Array(bits.buffer);""",
    16: """  const bits = new Uint16Array(bytes.buffer), numbers = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) {
    const sign = bits[i] & 0x8000 ? -1 : 1, exponent = (bits[i] >> 10) & 31, rest = bits[i] & 1023;
    numbers[i] = sign * (exponent === 31 ? (rest ? NaN : Infinity)
      : exponent ? (1 + rest / 1024) * 2 ** (exponent - 15) : rest * 2 ** -24);
  }
  return numbers;""",
}

# A parameter that a step reads in two ways, as W and as its transpose, is trained in the first of its places
TIE = """// The places where a weight stands once more: they follow the first, and their gradients are added to its own.
function tie() {
for (const [at, of, step, count] of ties) for (let i = 0; i < count; i++) w[at + i] = w[of + i * step];
}

function untie(gradients) {
for (const [at, of, step, count] of ties)
for (let i = 0; i < count; i++) {
gradients[of + i * step] += gradients[at + i];
gradients[at + i] = 0;
}
}

"""

_NAMED = """// Each parameter by its name in torch, and the blocks of it among the weights: element [i, j] of a block
// is element [from[0] + i, from[1] + j] of the parameter, and weights[at + i * strides[0] + j * strides[1]].
export const parameters = TABLE;

// Weights, or gradients by them, by the name of each parameter in torch, in the order that it has there
export function named(weights) {
  const size = (shape) => shape.reduce((a, b) => a * b, 1);
  const one = ({ shape, parts }) => {
    const found = new Float32Array(size(shape));
    for (const { from, shape: sizes, at, strides } of parts)
      for (let k = 0; k < size(sizes); k++) {
        let rest = k, weight = at, place = 0;
        for (let d = sizes.length - 1, step = 1; d >= 0; step *= shape[d--]) {
          const i = rest % sizes[d];
          rest = (rest - i) / sizes[d];
          weight += i * strides[d];
          place += (from[d] + i) * step;
        }
        found[place] = weights[weight];
      }
    return found;
  };
  return Object.fromEntries(Object.entries(parameters).map(([name, parameter]) => [name, one(parameter)]));
}
"""


def named(places: Places) -> str:
    """The table of parameters, and the function that reads it."""
    table = {
        name: {
            "shape": shape,
            "parts": [{"from": p.start, "shape": p.shape, "at": p.at, "strides": p.strides} for p in parts],
        }
        for name, (shape, parts) in places.parameters.items()
    }
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in table.items())
    return _NAMED.replace("TABLE", f"{{\n{lines}\n}}")


GENERATE = """// Read a prompt, text or tokens, then write so many tokens; the next call goes on from there.
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

_PICK = """// Of each token, the logarithm of its probability.
export function logProbabilities(output) {
  const most = output.reduce((a, b) => Math.max(a, b)), sum = output.reduce((a, o) => a + Math.exp(o - most), 0);
  return Float64Array.from(output, (o) => o - most - Math.log(sum));
}

// A token, drawn with a temperature (0: the likeliest) from the topK likeliest (0: all).
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


def reading(texts: Texts) -> str:
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


# `read` gives each token as [its number, where its text ends]; what was never seen is `unknown`.
_CHARACTERS = """const numbers = new Map(texts.map((text, i) => [text, i]));
export function read(text) {
  let end = 0;
  return [...text].map((c) => [numbers.get(c) ?? unknown, (end += c.length)]);
}
export function encode(text) {
  const seen = (c) => check(numbers.get(c) > 0, `the model has never seen ${JSON.stringify(c)}`);
  [...text].forEach(seen);
  return read(text).map(([token]) => token);
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
    "byte": """export function read(text) {
  let end = 0;
  return [...text].flatMap((c) => {
    const bytes = [...new TextEncoder().encode(c)], start = end;
    end += c.length;
    return bytes.map((byte, i) => [byte, i < bytes.length - 1 ? start : end]);
  });
}
export function encode(text) {
  return [...new TextEncoder().encode(text)];
}
"""
    + _BYTES,
    "subword": """export function encode() {
  throw new Error("subwords are made by a program of their own: give the prompt as tokens");
}
export function read() {
  return encode();
}
"""
    + _BYTES,
    "word": """\
const numbers = new Map(texts.map((text, i) => [text, i]).slice(2)).set("<unk>", 0).set("<eos>", 1);
const alone = /^[UNSPACED]/u;
// What stands between white space, as Python has it; a line that is over ends in a token of its own
export function read(text) {
  let start = 0;
  const lines = text.split("\\n");
  return lines.flatMap((line, i) => {
    const words = [...line.matchAll(WORD)].map((found) => {
      return [numbers.get(found[0]) ?? 0, start + found.index + found[0].length];
    });
    start += line.length + 1;
    return i < lines.length - 1 ? [...words, [1, start]] : words;
  });
}
export function encode(text) {
  return read(text).map(([token]) => token);
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
