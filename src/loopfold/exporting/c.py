"""C: a step as one `.c` and one `.h`, which need nothing but a C99 compiler and libm, and allocate nothing."""

import math
import re
from collections.abc import Iterable
from string import Template

import torch

from loopfold.exporting.texts import Texts
from loopfold.exporting.writing import Writer, indented, single

_FUNCTIONS = {
    "product": """\
static void loopfold_product(const float *restrict x, const float *restrict matrix, int rows, int columns,
                             float *restrict y) {
    int i = 0, j;
    for (j = 0; j < columns; j++) y[j] = 0;
    for (; i + 4 <= rows; i += 4) {  /* four rows at a time, so that y is loaded and stored less often */
        const float *m = matrix + (size_t)i * columns;
        const float a = x[i], b = x[i + 1], c = x[i + 2], d = x[i + 3];
        for (j = 0; j < columns; j++)
            y[j] += a * m[j] + b * m[columns + j] + c * m[2 * columns + j] + d * m[3 * columns + j];
    }
    for (; i < rows; i++)
        for (j = 0; j < columns; j++) y[j] += x[i] * matrix[(size_t)i * columns + j];
}
""",
    "rows": """\
static void loopfold_rows(const float *which, int many, const float *table, int count, int width, float *y) {
    int i, j;
    for (i = 0; i < many; i++) {
        const int k = which[i] > 0 ? (which[i] < count ? (int)which[i] : count - 1) : 0;
        for (j = 0; j < width; j++) y[i * width + j] = table[(size_t)k * width + j];
    }
}
""",
    "take": """\
static void loopfold_take(const float *x, const int *from, int width, float *y) {
    int i;
    for (i = 0; i < width; i++) y[i] = from[i] < 0 ? 0 : x[from[i]];
}
""",
}

_GENERATE = Template("""\
static float loopfold_uniform(unsigned long long *seed) {  /* in [0, 1) */
    unsigned long long z = (*seed += 0x9E3779B97F4A7C15ULL);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
    return (float)((z ^ (z >> 31)) >> 40) / 16777216.0f;
}

long ${name}_pick(const float *output, float temperature, long top_k, unsigned long long *seed) {
    static const long unknown = $unknown;  /* which is never written; -1: there is none */
    float least = -INFINITY, greatest = -INFINITY, total = 0, left;
    long i, best = -1;
    for (i = 0; i < $size; i++)
        if (i != unknown && (best < 0 || output[i] > greatest)) greatest = output[i], best = i;
    if (!(temperature > 0) || top_k == 1) return best;
    if (top_k > 0 && top_k < $size) {  /* the value of rank top_k */
        float above = INFINITY;
        for (left = (float)top_k; left > 0;) {
            float next = -INFINITY;
            long same = 0;
            for (i = 0; i < $size; i++) {
                if (i == unknown || output[i] >= above) continue;
                if (output[i] > next) next = output[i], same = 0;
                same += output[i] == next;
            }
            if (!same) break;
            least = above = next, left -= (float)same;
        }
    }
    for (i = 0; i < $size; i++)
        if (i != unknown && output[i] >= least) total += exp((output[i] - greatest) / temperature);
    left = loopfold_uniform(seed) * total;
    for (i = 0; i < $size; i++) {
        if (i == unknown || !(output[i] >= least)) continue;
        left -= exp((output[i] - greatest) / temperature);
        if (left < 0) return i;
        best = i;
    }
    return best;
}

int ${name}_generate(${name}_model *m, const long *prompt, long prompt_length, long *written, long length,
                     float temperature, long top_k, unsigned long long *seed) {
    float output[$size];
    long i;
    for (i = 0; i < prompt_length; i++)
        if (prompt[i] < 0 || prompt[i] >= $size) return -1;
    for (i = 0; i < prompt_length + length; i++) {
        ${name}_step(m, m->last, output);
        if (i < prompt_length) m->last = prompt[i];
        else m->last = written[i - prompt_length] = ${name}_pick(output, temperature, top_k, seed);
    }
    return 0;
}
""")


class CWriter(Writer):
    variable, constant, truth = "float", "const float", "const int"

    def literal(self, number: float) -> str:
        number = single(number)
        return f"{number:.9e}f" if math.isfinite(number) else _float(number)

    def loop_of(self, index: str, count: int) -> str:
        return f"for (int {index} = 0; {index} < {count}; {index}++) {{"

    def declare(self, name: str, width: int) -> None:
        self.lines.append(f"float {name}[{width}];")

    def alias(self, name: str, row: str, start: int) -> None:
        self.lines.append(f"const float *const {name} = {row} + {start};")

    def copy(self, row: str, width: int, into: str, at: int) -> None:
        self.lines.append(f"memcpy({into} + {at}, {row}, {width} * sizeof(float));")

    def weight(self, offset: int) -> str:
        return f"w + {offset}"

    def constant_row(self, index: int, width: int) -> str:
        return f"({self.weight(self.offsets[index])})"

    # ---- the files

    def source(self, name: str, inside: bool) -> str:
        """The `.c`."""
        program, texts = self.program, self.texts
        used = [
            text for function, text in _FUNCTIONS.items() if any(f"loopfold_{function}(" in line for line in self.body)
        ]
        reset = [
            f"memcpy(m->{field}, m->weights + {at}, sizeof m->{field});"
            for field, at in zip(self.fields, self.starts, strict=True)
        ]
        reset += ["m->count = 0;"] if program.counts else []
        reset += [f"m->last = {name.upper()}_START;"] if texts else []
        lines = [
            f"/* One step of {program.name}, made by Loopfold: see {name}.h. */",
            f'#include "{name}.h"',
            "",
            "#include <math.h>",
            "#include <stddef.h>",
            "#include <string.h>",
            "#include <tgmath.h>",
            "",
            *used,
            *[_integers(index, places) for index, places in self.indices],
            *([_floats(f"{name}_weights", program.weights())] if inside else []),
            f"{_init(name, inside)} {{",
            f"m->weights = {f'{name}_weights' if inside else 'weights'};",
            f"{name}_reset(m);",
            "}",
            "",
            f"void {name}_reset({name}_model *m) {{",
            *reset,
            "}",
            "",
            f"{self._signature(name)} {{",
            *self._step(),
            "return 0;",
            "}",
        ]
        if texts:
            unknown = str(-1 if texts.unknown is None else texts.unknown)
            generate = _GENERATE.substitute(name=name, unknown=unknown, size=texts.size)
            lines += ["", generate, _strings(name, texts)]
        return indented(lines, "    ")

    def header(self, name: str, inside: bool) -> str:
        """The `.h`."""
        program, big = self.program, name.upper()
        beside = "" if inside else f"; weights are the {self.size} numbers of {name}.bin, which stay where they are"
        sizes = zip(self.fields, program.state, strict=True)
        lines = [
            f"/* One step of {program.name}, made by Loopfold. A {name}_model keeps the state of one sequence.",
            "",
            f"   {name}_init   once, before all else{beside}",
            f"   {name}_reset  back to the state before the first step",
            f"   {name}_step   reads x(t), writes the output, moves the state on; 0, or -1 where a token is none */",
            f"#ifndef {big}_H",
            f"#define {big}_H",
            "",
            "#ifdef __cplusplus",
            'extern "C" {',
            "#endif",
            "",
            f"#define {big}_WEIGHTS {self.size}",
            *(f"#define {big}_{line}" for line in self._sizes()),
            *[
                f"#define {big}_{given.upper()} {leaf.size}"
                for given, leaf in zip(self._outputs, self.program.outputs, strict=True)
            ],
            "",
            "typedef struct {",
            "    const float *weights;",
            *[f"    float {field}[{leaf.size}];" for field, leaf in sizes],
            *(["    long count;  /* steps so far */"] if program.counts else []),
            *(["    long last;  /* the token that the next step reads */"] if self.texts else []),
            f"}} {name}_model;",
            "",
            f"{_init(name, inside)};",
            f"void {name}_reset({name}_model *m);",
            f"{self._signature(name)};",
            *(_declared(name) if self.texts else []),
            "",
            "#ifdef __cplusplus",
            "}",
            "#endif",
            "#endif",
        ]
        return "\n".join(lines) + "\n"

    def _sizes(self) -> list[str]:
        """How large x is; of tokens, how many there are."""
        if self.texts:
            size = self.texts.size
            return [f"TOKENS {size}", f"START {size}  /* what the first step reads, before any token */"]
        pairs = zip(self.names, self.program.x, strict=True)
        return [f"{name.upper()}{'_KINDS' if leaf.tokens else ''} {leaf.tokens or leaf.size}" for name, leaf in pairs]

    @property
    def _outputs(self) -> list[str]:
        many = len(self.program.outputs)
        return ["output"] if many == 1 else [f"output{i}" for i in range(many)]

    def _signature(self, name: str) -> str:
        reads = [
            f"long {given}" if leaf.tokens else f"const float *{given}"
            for given, leaf in zip(self.names, self.program.x, strict=True)
        ]
        return f"int {name}_step({', '.join([f'{name}_model *m', *reads, *[f'float *{o}' for o in self._outputs]])})"

    def _step(self) -> list[str]:
        program = self.program
        end = [
            f"memcpy({given}, {row}, {leaf.size} * sizeof(float));"
            for given, row, leaf in zip(self._outputs, self.gives, self.program.outputs, strict=True)
        ]
        end += [f"memcpy(m->{self.fields[i]}, {row}, sizeof m->{self.fields[i]});" for i, row in self.moves.items()]
        end += ["m->count++;"] if program.counts else []

        begin = []
        for i, (k, table) in enumerate(program.inputs):
            if table is not None:
                at = f"w + {self.table_at(i)} + (size_t){self.names[k]} * {table.shape[1]}"
                begin.append(f"const float *const input{i} = {at};")
            elif self.program.is_count(k):
                begin.append(f"const float input{i}[1] = {{(float)m->count}};")
            else:
                begin.append(f"const float *const input{i} = {self.names[k]};")
        rest = "\n".join([*begin, *self.body, *end])
        for i, field in enumerate(self.fields):
            if re.search(rf"(?<!>)\bstate{i}\b", rest):
                begin.append(f"const float *const state{i} = m->{field};")
        tokens = [(name, leaf.tokens) for name, leaf in zip(self.names, self.program.x, strict=True) if leaf.tokens]
        first = [f"if ({token} < 0 || {token} >= {count}) return -1;" for token, count in tokens]
        first += ["const float *const w = m->weights;"] if re.search(r"\bw\b", rest) else []
        read = "\n".join([*first, rest])
        first += [f"(void){name};" for name in self.names if not re.search(rf"\b{name}\b", read)]
        return [*first, *begin, *self.body, *end]


def _init(name: str, inside: bool) -> str:
    return f"void {name}_init({name}_model *m{'' if inside else ', const float *weights'})"


def _declared(name: str) -> list[str]:
    return [
        "",
        "/* The texts of the tokens, in UTF-8, and how many bytes each has. */",
        f"extern const char *const {name}_tokens[];",
        f"extern const unsigned short {name}_token_lengths[];",
        "",
        "/* A token, drawn with a temperature (0: the likeliest) from the top_k likeliest (0: all). */",
        f"long {name}_pick(const float *output, float temperature, long top_k, unsigned long long *seed);",
        "",
        "/* Read a prompt, then write so many tokens; the next call goes on from there. 0, or -1: a token is none. */",
        f"int {name}_generate({name}_model *m, const long *prompt, long prompt_length, long *written, long length,",
        f"{' ' * len(f'int {name}_generate(')}float temperature, long top_k, unsigned long long *seed);",
    ]


def _floats(name: str, tensors: Iterable[torch.Tensor]) -> str:
    numbers = [_float(x) for tensor in tensors for x in tensor.reshape(-1).tolist()] or ["0"]
    lines = [", ".join(numbers[i : i + 8]) for i in range(0, len(numbers), 8)]
    return f"static const float {name}[] = {{\n" + ",\n".join(lines) + "};\n"


def _float(x: float) -> str:
    if math.isfinite(x):
        return f"{x:.9g}"  # which gives every float32 back
    return "NAN" if math.isnan(x) else "INFINITY" if x > 0 else "-INFINITY"


def _integers(name: str, numbers: Iterable[int]) -> str:
    return f"static const int {name}[] = {{{', '.join(map(str, numbers))}}};"


def _strings(name: str, texts: Texts) -> str:
    def quoted(text: bytes) -> str:
        safe = b"".join(bytes([b]) if 32 <= b < 127 and b not in b'"\\?' else f"\\{b:03o}".encode() for b in text)
        return f'"{safe.decode()}"'

    strings = ",\n".join(map(quoted, texts.tokens))
    lengths = ", ".join(str(len(text)) for text in texts.tokens)
    return (
        f"const char *const {name}_tokens[] = {{\n{strings}}};\n\n"
        f"const unsigned short {name}_token_lengths[] = {{{lengths}}};"
    )
