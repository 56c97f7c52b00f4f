"""`export`: a model's step, written as files for other languages."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from loopfold.exporting.c import c_source
from loopfold.exporting.javascript import javascript_source
from loopfold.exporting.program import StepProgram
from loopfold.exporting.texts import Texts
from loopfold.files import write_whole
from loopfold.states import Step, name_of
from loopfold.stepgraph.graph import Refusal
from loopfold.text.vocabulary import Vocabulary

SUFFIXES = {".c": "C", ".js": "JavaScript", ".mjs": "JavaScript", ".onnx": "ONNX"}


def export(
    model: nn.Module | Step,
    path: str | Path,
    *,
    x: Any = None,
    vocabulary: Vocabulary | None = None,
    weights_beside: bool = False,
    half: bool = False,
) -> list[Path]:
    """Write one step of a model as a program that needs neither Python nor torch; returns the files.

    `model`           a transition, `Recurrent`, `Stacked`, `SequenceToSequence`, `SequenceToOne`, a language model, or
                      any step that compiles, as it is in evaluation
    `path`            model.c (C99, with model.h) or model.js (an ES module)
    `x`               like what a step reads, `[batch, …]`, for a step that does not say its size
    `vocabulary`      of a language model, so that the program reads and writes text
    `weights_beside`  of C: the weights in model.bin, not in the code
    `half`            of JavaScript: the weights in 16 bits each

    >>> import tempfile
    >>> from loopfold import GRU
    >>> [file.name for file in export(GRU(3, 5), Path(tempfile.mkdtemp()) / "gru.c")]
    ['gru.c', 'gru.h']
    """
    path = Path(path)
    kind = SUFFIXES.get(path.suffix)
    if kind is None:
        known = ", ".join(f"{suffix} ({language})" for suffix, language in SUFFIXES.items())
        raise ValueError(f"the end of {path.name!r} says nothing of a language: it must be one of {known}.")
    if half and kind != "JavaScript":
        raise ValueError("half is for JavaScript: in C a number has 32 bits.")
    if weights_beside and kind != "C":
        raise ValueError("weights_beside is for C: a JavaScript module holds its weights.")
    try:
        program = StepProgram.of(model, x)
    except Refusal as reason:
        raise ValueError(f"{name_of(model)} cannot be exported: {reason}") from None
    texts = None if vocabulary is None else Texts.of(vocabulary)
    if texts is not None and [leaf.tokens for leaf in program.x] != [texts.size + 1]:
        raise ValueError(f"a vocabulary of {texts.size} goes with a model that reads tokens, of which it knows as many.")
    if kind == "JavaScript":
        return _written({path: javascript_source(program, texts, half).encode()})
    if not re.fullmatch(r"[A-Za-z]\w*", path.stem, re.ASCII):
        raise ValueError(f"{path.stem!r} begins every name of the C code: it must be letters, digits and _.")
    source, header = c_source(program, path.stem, texts, not weights_beside)
    files = {path: source.encode(), path.with_suffix(".h"): header.encode()}
    if weights_beside:
        numbers = torch.cat([tensor.reshape(-1) for tensor in program.weights()])
        files[path.with_suffix(".bin")] = numbers.numpy().astype("<f4").tobytes()
    return _written(files)


def _written(files: dict[Path, bytes]) -> list[Path]:
    for path, data in files.items():
        write_whole(path, data)
    return [*files]
