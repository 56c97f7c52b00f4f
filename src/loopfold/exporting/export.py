"""`export`: a model's step, written as files for other languages."""

from pathlib import Path
from typing import Any

from torch import nn

from loopfold.errors import Argument, OptionError
from loopfold.exporting.c import CWriter
from loopfold.exporting.javascript import JavaScriptWriter
from loopfold.exporting.onnx import onnx_model
from loopfold.exporting.places import Places, places_of
from loopfold.exporting.program import StepProgram
from loopfold.exporting.stock import stock
from loopfold.exporting.texts import Texts
from loopfold.exporting.writing import is_name
from loopfold.files import check_place, write_whole
from loopfold.language.recurrent import RecurrentLM
from loopfold.states import Step, name_of
from loopfold.stepgraph.graph import Refusal
from loopfold.text.vocabulary import Vocabulary

LANGUAGES = {".c": "C", ".js": "JavaScript", ".mjs": "JavaScript", ".onnx": "ONNX"}
FOR = {  # where an argument has an effect
    "weights_beside": ("C",),
    "half": ("JavaScript",),
    "backward": ("JavaScript",),
    "one_step": ("ONNX",),
    "lengths": ("ONNX",),
    "vocabulary": ("C", "JavaScript"),
}


def export(
    model: nn.Module | Step,
    path: str | Path,
    *,
    x: Any = None,
    context: Any = None,
    vocabulary: Vocabulary | None = None,
    weights_beside: bool = False,
    half: bool = False,
    backward: bool = False,
    one_step: bool = False,
    lengths: bool = False,
) -> list[Path]:
    """Write a model as a program that needs neither Python nor torch, in the language that `path` says.

    `model`           a transition, `Recurrent`, `Stacked`, `SequenceToSequence`, `SequenceToOne`, a language model, or
                      any step that compiles; as it is in evaluation, in float32
    `path`            model.c (C99, with a model.h), model.js (an ES module) or model.onnx
    `x`               like what a step reads, `[batch, …]`, for a step that does not say its size
    `context`         like what every step reads alike, `[batch, …]`, for a step that reads one: of this size it is then
                      another argument of every step, and in ONNX another input
    `vocabulary`      of a language model: the program then reads and writes text (C, JavaScript)
    `weights_beside`  the weights in model.bin, not in the code (C)
    `half`            the weights in 16 bits each (JavaScript)
    `backward`        with the reverse step: back-propagation through time, and so training (JavaScript)
    `one_step`        one step, in place of a whole sequence (ONNX; the others take single steps anyway)
    `lengths`         with how long each sequence is as another input (ONNX)

    Returns the files that were written.

    >>> import tempfile
    >>> from loopfold import GRU
    >>> [file.name for file in export(GRU(3, 5), Path(tempfile.mkdtemp()) / "gru.c")]
    ['gru.c', 'gru.h']
    """
    path = Path(path)
    check_place(path, "model.js", "path")
    language = LANGUAGES.get(path.suffix)
    if language is None:
        known = ", ".join(f"{suffix} ({name})" for suffix, name in LANGUAGES.items())
        raise OptionError(f"{path.name!r} does not end in the name of a language: type one of {known}.")
    asked = {"weights_beside": weights_beside, "half": half, "backward": backward}
    asked |= {"one_step": one_step, "lengths": lengths, "vocabulary": vocabulary is not None}
    for name, value in asked.items():
        if value and language not in FOR[name]:
            raise OptionError(Argument(name), f" has no effect in {language}: it is for {' and '.join(FOR[name])}.")
    if one_step and lengths:
        raise OptionError("one step has no length: leave out ", Argument("one_step"), " or ", Argument("lengths"), ".")
    if language == "C" and not is_name(path.stem):
        raise ValueError(
            f"{path.stem!r} begins every name of the C code: it must be letters, digits and _, a letter first, and no "
            f"keyword, as in model.c."
        )
    program, texts = _read(model, x, context, vocabulary, learning=backward)
    if language == "ONNX":
        cells = None if one_step else stock(model.network if isinstance(model, RecurrentLM) else model)
        files = {path: onnx_model(program, one_step, lengths, cells).SerializeToString()}
    else:
        places = _places(model, x, context) if backward else None
        files = _sources(program, path, language, texts, asked, places)
    for file, data in files.items():
        try:
            write_whole(file, data)
        except OSError as error:
            raise OptionError(f"{file} cannot be written: {error.strerror or error}.") from error
    return [*files]


def module_of(model: nn.Module, vocabulary: Vocabulary, bits: int) -> str:
    """A language model as the text of an ES module, with its reverse step and its operations."""
    return JavaScriptWriter(*_read(model, None, None, vocabulary), backward=True, watched=True).source(bits)


def _places(model: Any, x: Any, context: Any) -> Places:
    try:
        return places_of(model, x, context)
    except Refusal as reason:
        raise ValueError(
            f"{name_of(model)} cannot be exported with its reverse step: {reason} For gradients by x alone, type "
            f"model.requires_grad_(False) first."
        ) from None


def _read(
    model: nn.Module | Step, x: Any, context: Any, vocabulary: Vocabulary | None, learning: bool = False
) -> tuple[StepProgram, Texts | None]:
    """What there is to write."""
    try:
        program = StepProgram.of(model, x, context, learning=learning)
    except Refusal as reason:
        raise ValueError(f"{name_of(model)} cannot be exported: {reason}") from None
    texts = None if vocabulary is None else Texts.of(vocabulary)
    if texts is not None and [leaf.tokens for leaf in program.x] != [texts.size + 1]:
        raise ValueError(
            f"a vocabulary of {texts.size} tokens goes with a language model that reads so many; got {name_of(model)}."
        )
    return program, texts


def _sources(
    program: StepProgram, path: Path, language: str, texts: Texts | None, asked: dict[str, bool], places: Places | None
) -> dict[Path, bytes]:
    """What each file holds."""
    if language == "JavaScript":
        writer = JavaScriptWriter(program, texts, asked["backward"], parameters=places)
        return {path: writer.source(16 if asked["half"] else 32).encode()}
    c, named = CWriter(program, texts), (path.stem, not asked["weights_beside"])
    files = {path: c.source(*named).encode(), path.with_suffix(".h"): c.header(*named).encode()}
    if asked["weights_beside"]:
        files[path.with_suffix(".bin")] = program.numbers().numpy().astype("<f4").tobytes()
    return files
