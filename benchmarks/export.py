"""One step of an exported model: C, and a session of ONNX Runtime; characters a second of exported JavaScript in node.

    python benchmarks/export.py

LSTM 40 with 40 inputs, one core: C at `-O3`, 100,000 steps each timed by itself, and as many calls of a session of one
thread for the same step, both from their own language (C, Python). Then a GRU of 320 units over 100 characters in node,
written greedily. Needs cc, node, onnx and onnxruntime.
"""

import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import onnxruntime

import loopfold as lf
from loopfold.language.recurrent import recurrent_lm

MAIN = r"""
#define _POSIX_C_SOURCE 199309L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "cell.h"
#define STEPS 100000
static double took[STEPS];
static int less(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
int main(void) {
    static cell_model model;
    float x[CELL_X] = {0}, output[CELL_OUTPUT], sum = 0;
    cell_init(&model);
    for (int t = 0; t < STEPS; t++) {
        struct timespec a, b;
        x[t % CELL_X] = (float)(t % 7) * 0.1f;
        clock_gettime(CLOCK_MONOTONIC, &a);
        cell_step(&model, x, output);
        clock_gettime(CLOCK_MONOTONIC, &b);
        took[t] = (double)(b.tv_sec - a.tv_sec) * 1e6 + (double)(b.tv_nsec - a.tv_nsec) * 1e-3;
        sum += output[0];
    }
    qsort(took, STEPS, sizeof took[0], less);
    printf("%f %f %f\n", took[STEPS / 2], took[STEPS - STEPS / 1000], sum);
    return 0;
}
"""
NODE = """
import { create } from "./writer.mjs";
const model = create(), steps = 3000;
model.generate([], 200, { temperature: 0 });
const begin = performance.now();
model.generate([], steps, { temperature: 0 });
console.log((1000 * steps) / (performance.now() - begin));
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cell = lf.LSTM(40, 40)
        lf.export(cell, folder / "cell.c")
        (folder / "main.c").write_text(MAIN)
        build = ["cc", "-std=c99", "-O3", "main.c", "cell.c", "-o", "cell", "-lm"]
        subprocess.run(build, cwd=folder, check=True)
        said = subprocess.run(["./cell"], cwd=folder, check=True, capture_output=True, text=True).stdout
        median, rare, _ = map(float, said.split())

        lf.export(cell, folder / "cell.onnx", one_step=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(folder / "cell.onnx", options)
        row = np.zeros((1, 40), dtype=np.float32)
        took = []
        for _ in range(20_000):
            begin = time.perf_counter()
            session.run(None, {"x": row, "h": row, "c": row})
            took.append(time.perf_counter() - begin)
        theirs = 1e6 * float(np.median(took))
        print(f"C, LSTM 40: median {median:.2f} µs, 99.9 % {rare:.2f} µs; ONNX Runtime's call {theirs:.1f} µs, "
              f"{theirs / median:.1f} times as long")  # fmt: skip

        text = "".join(map(chr, range(33, 132)))
        vocabulary = lf.Characters.of(text)
        lf.export(recurrent_lm(vocabulary.size, [lf.GRU(320, 320)], 320), folder / "writer.mjs", vocabulary=vocabulary)
        (folder / "run.mjs").write_text(NODE)
        said = subprocess.run(["node", "run.mjs"], cwd=folder, check=True, capture_output=True, text=True).stdout
        print(f"JavaScript, GRU 320, {vocabulary.size} tokens: {float(said):,.0f} characters a second")


if __name__ == "__main__":
    main()
