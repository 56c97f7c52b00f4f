"""A step in C, JavaScript and ONNX gives what it gives in Python, whatever it is."""

import ctypes
import json
import math
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_cli import refused, worked
from test_random_steps import BINARY, CHOICES, UNARY, WITH_WEIGHTS, RandomStep
from torch import Tensor, nn
from zoo import AWKWARD, TENSORS, WITH_INPUT, Autonomous, Awkward

import loopfold as lf
from loopfold.exporting.onnx import onnx_model
from loopfold.exporting.program import StepProgram
from loopfold.exporting.stock import Stock, stock
from loopfold.language.recurrent import recurrent_lm
from loopfold.states import leaves
from loopfold.stepgraph.graph import Refusal
from loopfold.text.vocabulary import Bytes, Characters, Words

Rows = list[list[float]]
CC = shutil.which("cc")
NODE = shutil.which("node")
STRICT = ["-std=c99", "-Wall", "-Wextra", "-pedantic", "-Werror"]


def by_definition(model: nn.Module, x: Tensor) -> NDArray[Any]:
    """The outputs of one sequence `[τ, features]`, by the definition, in the dtype of x."""
    found = lf.unfold(model.to(x.dtype), x[:, None], engine=lf.Sequential())
    first = leaves(found.states if found.outputs is None else found.outputs)[0]
    return first.detach().reshape(len(x), -1).double().numpy()


# ------------------------------------------------------------------ running what was written


def compiled(folder: Path, sources: Sequence[Path], optimise: str = "-O1") -> ctypes.CDLL:
    if CC is None:
        pytest.skip("no C compiler")
    library = folder / "exported.so"
    command = [CC, *STRICT, optimise, "-shared", "-fPIC", *map(str, sources), "-o", str(library), "-lm"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def in_c(library: ctypes.CDLL, name: str, x: Tensor, width: int) -> NDArray[Any]:
    memory = ctypes.create_string_buffer(1 << 20)
    library[f"{name}_init"](memory)
    out = np.full((len(x), width), np.nan, dtype=np.float32)
    for row, into in zip(x, out, strict=True):
        given = np.ascontiguousarray(row.reshape(-1).numpy())
        read = ctypes.c_long(int(given[0])) if row.dtype == torch.int64 else ctypes.c_void_p(given.ctypes.data)
        assert library[f"{name}_step"](memory, read, ctypes.c_void_p(into.ctypes.data)) == 0
    return out


def in_node(folder: Path, names: Sequence[str], xs: Sequence[Tensor]) -> list[NDArray[Any]]:
    if NODE is None:
        pytest.skip("no node")
    data = [{"name": name, "x": x.reshape(len(x), -1).tolist(), "tokens": x.dtype == torch.int64}
            for name, x in zip(names, xs, strict=True)]  # fmt: skip
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "run.mjs").write_text(
        """import { readFileSync, writeFileSync } from "node:fs";
        const found = [];
        for (const { name, x, tokens } of JSON.parse(readFileSync(new URL("data.json", import.meta.url)))) {
          const { create } = await import(`./${name}.mjs`);
          const model = create();
          for (const row of x.slice(0, 2)) model.step(tokens ? row[0] : row);
          model.reset();
          found.push(x.map((row) => [...model.step(tokens ? row[0] : row)].map(String)));
        }
        writeFileSync(new URL("found.json", import.meta.url), JSON.stringify(found));"""
    )
    done = subprocess.run([NODE, str(folder / "run.mjs")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [np.array(rows, dtype=np.float64) for rows in json.loads((folder / "found.json").read_text())]


def in_onnx(
    program: StepProgram,
    x: Tensor,
    one_step: bool = False,
    lengths: Tensor | None = None,
    known: Stock | None = None,
) -> list[Any]:
    """The outputs `[τ, batch, …]` and the last state, for x `[τ, batch, …]`."""
    runtime = pytest.importorskip("onnxruntime")
    model = onnx_model(program, one_step, lengths is not None, known)
    options = runtime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 3, 1
    session = runtime.InferenceSession(model.SerializeToString(), options)
    batch = x.shape[1]
    state = [s.reshape(1, *leaf.shape).expand(batch, *leaf.shape).numpy()
             for s, leaf in zip(program.start, program.state, strict=True)]  # fmt: skip
    first, *names = [given.name for given in session.get_inputs()][: 1 + len(state)]
    given = {first: x.numpy()} | dict(zip(names, state, strict=True))
    if not one_step:
        return session.run(None, given | ({} if lengths is None else {"lengths": lengths.numpy()}))
    outputs = []
    for row in x.numpy():
        out, *state = session.run(None, {first: row} | dict(zip(names, state, strict=True)))
        outputs.append(out)
    return [np.stack(outputs), *state]


# ------------------------------------------------------------------ every kind of step


def steps() -> dict[str, Callable[[], tuple[nn.Module, Tensor]]]:
    def cell(kind: Callable[[int, int], nn.Module]) -> Callable[[], tuple[nn.Module, Tensor]]:
        return lambda: (kind(6, 6), torch.randn(9, 6))

    found = {kind.__name__: cell(kind) for kind in (*WITH_INPUT, *TENSORS)}
    found |= {name: cell(partial(Own, step)) for name, step in OWN.items()}
    return found | {name: cell(partial(awkward, step)) for name, step in AWKWARD.items()}


def awkward(step: Callable[..., tuple[Tensor, Tensor]], n_in: int, n: int) -> nn.Module:
    return Awkward(step, n)


class Own(lf.Transition):
    """A step of two states of 6 and 2 features, given as a function."""

    def __init__(self, step: Callable[..., Any], n_in: int, n: int) -> None:
        super().__init__()
        self.step, self.k = step, nn.Parameter(torch.ones(n))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.k.new_full((batch, 6), 0.1), self.k.new_zeros(batch, 2)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        return self.step(self, *state, x)


OWN: dict[str, Callable[..., Any]] = {
    "a delay line that hands on": lambda f, a, b, x: (b * f.k[:2], (torch.cat([a[:, 2:], x[:, :2]], -1), a[:, :2])),
    "parts of the state change places": lambda f, a, b, x: (torch.cat([a[:, 4:], b, x[:, :2]], -1), a[:, 1:3]),
    "the old state as the output": lambda f, a, b, x: (a, (torch.tanh(a + x), b)),
    "x itself": lambda f, a, b, x: (0.5 * a + x, (x, x[:, 3:5])),
    "jumps": lambda f, a, b, x: (torch.floor(a * 10) + torch.fmod(x, 0.7), b + torch.round(x[:, :2] * 2)),
    "inverse functions": lambda f, a, b, x: (
        torch.asin(torch.tanh(a)) + torch.acos(torch.sin(x)),
        torch.acosh(1.5 + b * b) + torch.atanh(0.5 * torch.cos(x[:, :2])),
    ),
    "choices and orders": lambda f, a, b, x: (
        torch.sort(0.5 * a + x, dim=-1, stable=True)[0] * f.k + nn.functional.pad(a, (0, 1), value=0.3)[:, 1:],
        b + (a + x).max(-1, keepdim=True)[0] * torch.prod(x, -1, keepdim=True),
    ),
    "near zero": lambda f, a, b, x: (torch.expm1(1e-4 * x) + torch.log1p(1e-5 * a) * 1e4, b),
}


def test_every_kind_of_step(tmp_path: Path) -> None:
    close(tmp_path, {f"m{i}": make for i, make in enumerate(steps().values())})


OPERATIONS = [op for op in (*WITH_WEIGHTS, *UNARY, *BINARY, *CHOICES) if op not in ("dropout", "noise")]


@pytest.mark.parametrize("part", range(10))
def test_random_steps(part: int, tmp_path: Path) -> None:
    def make(seed: int) -> tuple[nn.Module, Tensor]:
        choose = random.Random(seed)
        program = [
            (choose.choice(OPERATIONS), choose.randrange(50), choose.randrange(50))
            for _ in range(choose.randrange(1, 9))
        ]
        n = choose.choice([4, 6, 18])
        return RandomStep(program, n, choose.randrange(1, 4)), torch.randn(5, n)

    close(tmp_path, {f"m{i}": partial(make, 1000 * part + i) for i in range(50)})


def close(folder: Path, makes: dict[str, Callable[[], tuple[nn.Module, Tensor]]]) -> None:
    """Each model in every language gives what it gives in Python."""
    programs, xs, truth, bound = {}, {}, {}, {}
    refused = {}
    for i, (name, make) in enumerate(makes.items()):
        torch.manual_seed(i)
        model, x = make()
        try:
            programs[name] = StepProgram.of(model, x[:1])
        except Refusal as reason:
            refused[name] = str(reason)
            continue
        lf.export(model, folder / f"{name}.c", x=x[:1])
        lf.export(model, folder / f"{name}.mjs", x=x[:1])
        xs[name] = x
        truth[name] = by_definition(model, x.double())
        rough = np.abs(by_definition(model, x) - truth[name]).max()  # what float32 alone makes of it
        bound[name] = max(1e-5 * max(1.0, np.abs(truth[name]).max()), 20 * rough)
    assert len(refused) < len(makes) / 10, refused
    library = compiled(folder, [folder / f"{name}.c" for name in programs])
    node = in_node(folder, [*programs], [*xs.values()])
    for name, by_node in zip(programs, node, strict=True):
        error = {
            "C": in_c(library, name, xs[name], truth[name].shape[1]) - truth[name],
            "JavaScript": by_node - truth[name],
            "ONNX": in_onnx(programs[name], xs[name][:, None])[0].reshape(truth[name].shape) - truth[name],
        }
        for language, e in error.items():
            assert np.abs(e).max() <= bound[name], (name, language, programs[name].forward.order)


class FromRamp(Autonomous):
    def initial_state(self, batch: int) -> Tensor:
        return torch.linspace(-1, 1, len(self.W)).expand(batch, -1)


def test_a_step_without_input(tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    model = FromRamp(5)
    truth = lf.unfold(model, steps=4, state=model.initial_state(1), engine=lf.Sequential()).hidden[:, 0].detach()
    lf.export(model, tmp_path / "m.c")
    lf.export(model, tmp_path / "m.mjs")
    lf.export(model, tmp_path / "m.onnx")
    library = compiled(tmp_path, [tmp_path / "m.c"])
    memory, out = ctypes.create_string_buffer(1 << 16), np.zeros(5, dtype=np.float32)
    library.m_init(memory)
    for row in truth:
        library.m_step(memory, ctypes.c_void_p(out.ctypes.data))
        np.testing.assert_allclose(out, row, atol=1e-6)
    code = "const model = create(); console.log(JSON.stringify([1, 2, 3, 4].map(() => [...model.step()])));"
    np.testing.assert_allclose(node(tmp_path / "m.mjs", "create", code), truth, atol=1e-6)
    session = runtime.InferenceSession(tmp_path / "m.onnx")
    start = model.initial_state(1).numpy()
    found = session.run(None, {"s": start, "steps": np.array(4)})
    np.testing.assert_allclose(found[0][:, 0], truth, atol=1e-6)


def node(module: Path, names: str, code: str) -> Any:
    """What a program prints that imports some names of a module."""
    if NODE is None:
        pytest.skip("no node")
    code = f'import {{ {names} }} from "{module.as_uri()}";\n{code}'
    done = subprocess.run([NODE, "--input-type=module", "-e", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# ------------------------------------------------------------------ layers, readouts, whole sequences


def stacked() -> nn.Module:
    layers = lf.Stacked([lf.Recurrent(lf.GRU(3, 5)), lf.Recurrent(lf.LSTM(5, 4)), lf.Recurrent(lf.Elman(4, 6))])
    return lf.SequenceToSequence(layers, outputs=7)


def of_tokens() -> nn.Module:
    return lf.SequenceToSequence(lf.Recurrent(lf.Embedded(lf.LSTM(3, 5), nn.Embedding(9, 3))), outputs=4)


MODELS = {
    "stacked": stacked,
    "tokens": of_tokens,
    "a layer": lambda: lf.Recurrent(lf.LSTM(3, 5)),
    "relu": lambda: lf.Recurrent(lf.Elman(3, 5, torch.relu)),
    "no cell of ONNX's": lambda: lf.Recurrent(lf.MGU(3, 5)),
    "a transition": lambda: lf.LSTM(3, 5),
}


@pytest.mark.parametrize("name", MODELS)
def test_batches_and_lengths_in_onnx(name: str) -> None:
    torch.manual_seed(0)
    model, lengths = MODELS[name](), torch.tensor([6, 1, 4])
    with torch.no_grad():
        for p in model.parameters():
            p.normal_()  # biases too
    x = torch.randint(9, (6, 3)) if name == "tokens" else torch.randn(6, 3, 3)
    layer = model.recurrent if isinstance(model, lf.SequenceToSequence) else model
    run = lf.unfold(layer, x, lengths=lengths) if isinstance(model, lf.Transition) else layer(x, None, lengths)
    truth = model.readout(run.hidden) if isinstance(model, lf.SequenceToSequence) else run.hidden
    alive = torch.arange(6)[:, None, None] < lengths[:, None]
    program, known = StepProgram.of(model), stock(model)
    assert (known is None) == (name == "no cell of ONNX's")
    for kind in [known, None]:
        out, *last = in_onnx(program, x, lengths=lengths, known=kind)
        np.testing.assert_allclose(out, torch.where(alive, truth, 0).detach(), atol=1e-5)
        for found, leaf in zip(last, leaves(run.last), strict=True):
            np.testing.assert_allclose(found, leaf.detach(), atol=1e-5)
        whole, by_steps = in_onnx(program, x, known=kind), in_onnx(program, x, one_step=True)
        for a, b in zip(whole, by_steps, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_learned_start_and_the_number_of_the_step(tmp_path: Path) -> None:
    class Timed(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.input_size, self.start = 2, nn.Parameter(torch.tensor([0.3, -0.7]))

        def initial_state(self, batch: int) -> Tensor:
            return self.start.expand(batch, 2)

        def forward(self, h: Tensor, x: Tensor, t: Tensor) -> Tensor:
            return torch.tanh(h * 0.9 + x * torch.cos(t))

    model, x = Timed(), torch.randn(7, 2)
    truth = by_definition(model, x)
    lf.export(model, tmp_path / "m.c")
    lf.export(model, tmp_path / "m.mjs")
    library = compiled(tmp_path, [tmp_path / "m.c"])
    np.testing.assert_allclose(in_c(library, "m", x, 2), truth, atol=1e-6)
    np.testing.assert_allclose(in_node(tmp_path, ["m"], [x])[0], truth, atol=1e-6)
    np.testing.assert_allclose(in_onnx(StepProgram.of(model), x[:, None])[0][:, 0], truth, atol=1e-6)


# ------------------------------------------------------------------ language models

VOCABULARIES = {
    "characters": Characters.of("to be or not to be,\nthat is the question: é日"),
    "bytes": Bytes(),
    "words": Words.of("to be or not to be that is the question\nto be or not <unk>\n"),
}


def language_model(kind: str) -> Any:
    torch.manual_seed(1)
    model = recurrent_lm(VOCABULARIES[kind].size, [lf.GRU(6, 8), lf.LSTM(8, 6)], 6, 0.3, tied=True)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    return model


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_a_language_model_writes_what_python_writes(kind: str, tmp_path: Path) -> None:
    model, vocabulary = language_model(kind), VOCABULARIES[kind]
    prompt = "to be\nor not"
    text = lf.generate(model, vocabulary, prompt, 30, lf.Greedy())
    ids = vocabulary.beginning(prompt).tolist()
    lf.export(model, tmp_path / "lm.c", vocabulary=vocabulary)
    lf.export(model, tmp_path / "lm.mjs", vocabulary=vocabulary)
    library = compiled(tmp_path, [tmp_path / "lm.c"])
    memory, seed = ctypes.create_string_buffer(1 << 20), ctypes.c_ulonglong(7)
    library.lm_init(memory)
    long = ctypes.c_long
    written = (long * 30)()
    assert library.lm_generate(memory, (long * len(ids))(*ids), long(len(ids)), written, long(12), ctypes.c_float(0),
                               long(0), ctypes.byref(seed)) == 0  # fmt: skip
    rest = (long * 18).from_buffer(written, 12 * ctypes.sizeof(long))
    assert library.lm_generate(memory, None, long(0), rest, long(18), ctypes.c_float(0), long(0),
                               ctypes.byref(seed)) == 0  # fmt: skip
    assert vocabulary.decode([*ids, *written]) == prompt + text
    assert library.lm_generate(memory, (long * 1)(vocabulary.size), long(1), written, long(0), ctypes.c_float(0),
                               long(0), ctypes.byref(seed)) == -1  # fmt: skip
    tokens = (ctypes.c_char_p * vocabulary.size).in_dll(library, "lm_tokens")
    assert [(t or b"").decode(errors="backslashreplace") for t in tokens][1:] == [
        *map(vocabulary.token, range(1, len(tokens)))
    ]

    first, numbers, read = node(
        tmp_path / "lm.mjs",
        "create, encode",
        f"""const model = create(), prompt = {json.dumps(prompt)};
        const first = model.generate(prompt, 30, {{ temperature: 0 }});
        model.reset();
        const ids = model.generate(encode(prompt), 30, {{ temperature: 0 }});
        console.log(JSON.stringify([first, ids, encode(prompt)]));""",
    )
    assert (numbers, read) == ([*written], ids)
    assert first == text


def test_tokens_are_drawn_as_often_as_they_should(tmp_path: Path) -> None:
    model, vocabulary = language_model("characters"), VOCABULARIES["characters"]
    lf.export(model, tmp_path / "lm.c", vocabulary=vocabulary)
    lf.export(model, tmp_path / "lm.mjs", vocabulary=vocabulary, half=True)
    library, n, draws = compiled(tmp_path, [tmp_path / "lm.c"]), vocabulary.size, 20_000
    torch.manual_seed(0)
    output = torch.randn(n).numpy()
    library.lm_pick.restype = ctypes.c_long
    for temperature, top_k in ((1.0, 0), (0.5, 0), (2.0, 5)):
        logits = torch.from_numpy(output).double() / temperature
        logits[0] = -math.inf  # the unknown
        if top_k:
            logits[logits < logits.topk(top_k).values[-1]] = -math.inf
        expected = logits.softmax(0).numpy()
        seed = ctypes.c_ulonglong(3)
        where = ctypes.c_void_p(output.ctypes.data)
        picks = [library.lm_pick(where, ctypes.c_float(temperature), ctypes.c_long(top_k), ctypes.byref(seed))
                 for _ in range(draws)]  # fmt: skip
        by_node = node(
            tmp_path / "lm.mjs",
            "pick",
            f"""const output = {json.dumps(output.tolist())}, counts = output.map(() => 0);
            for (let i = 0; i < {draws}; i++) counts[pick(output, {temperature}, {top_k})]++;
            console.log(JSON.stringify(counts));""",
        )
        for counts in (np.bincount(picks, minlength=n), np.array(by_node)):
            assert counts[expected == 0].sum() == 0
            spread = np.sqrt(expected * (1 - expected) / draws)
            assert (np.abs(counts / draws - expected) <= 5 * spread + 1e-9).all()


def test_weights_beside_the_code_and_in_half_precision(tmp_path: Path) -> None:
    model, x = lf.SequenceToSequence(lf.GRU(4, 30), outputs=3), torch.randn(5, 4)
    truth = model(x[:, None])[:, 0].detach().numpy()
    source, header, weights = lf.export(model, tmp_path / "m.c", weights_beside=True)
    numbers = np.fromfile(weights, dtype="<f4")
    assert f"#define M_WEIGHTS {len(numbers)}\n" in header.read_text()
    library = compiled(tmp_path, [source])
    memory, out = ctypes.create_string_buffer(1 << 16), np.zeros(3, dtype=np.float32)
    library.m_init(memory, ctypes.c_void_p(numbers.ctypes.data))
    for row, o in zip(x, truth, strict=True):
        library.m_step(memory, ctypes.c_void_p(row.numpy().ctypes.data), ctypes.c_void_p(out.ctypes.data))
        np.testing.assert_allclose(out, o, atol=1e-6)
    lf.export(model, tmp_path / "full.mjs")
    lf.export(model, tmp_path / "half.mjs", half=True)
    full, half = in_node(tmp_path, ["full", "half"], [x, x])
    np.testing.assert_allclose(full, truth, atol=1e-6)
    assert 1e-7 < np.abs(half - truth).max() < 1e-3


def test_a_sequence_to_one(tmp_path: Path) -> None:
    model, x = lf.SequenceToOne(lf.GRU(3, 5), outputs=2), torch.randn(6, 3)
    lf.export(model, tmp_path / "m.mjs")
    (found,) = in_node(tmp_path, ["m"], [x])
    for t in range(6):
        np.testing.assert_allclose(found[t], model(x[: t + 1, None])[0].detach(), atol=1e-6)


def test_modes_are_left_alone(tmp_path: Path) -> None:
    model: Any = lf.SequenceToSequence(lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 4)], dropout=0.5), outputs=2).eval()
    lf.export(model, tmp_path / "m.js")
    assert not any(part.training for part in model.modules())
    model.train()
    model.recurrent.dropout.eval()
    lf.export(model, tmp_path / "m.js")
    assert model.training
    assert not model.recurrent.dropout.training


def test_only_what_is_one_of_onnx_own_cells_is_taken_for_one() -> None:
    assert stock(lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 4)], dropout=0.5)) is not None
    assert stock(lf.Stacked([lf.GRU(3, 5), lf.GRU(5, 4)], dropout=nn.Tanh())) is None
    own = lf.GRU(3, 5)
    own.forward = lambda h, x: 0.5 * lf.GRU.forward(own, h, x)  # type: ignore[method-assign]
    assert stock(lf.Recurrent(own)) is None
    assert stock(lf.Recurrent(lf.LayerNormLSTM(3, 5))) is None
    assert stock(lf.Recurrent(lf.Elman(3, 5, torch.sin))) is None


class Named(lf.Transition):
    """States and x of awkward names."""

    input_size = 2

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return State(torch.zeros(batch, 2), torch.ones(batch, 2))

    def forward(self, state: tuple[Tensor, Tensor], new: Tensor) -> tuple[Tensor, Tensor]:
        return State(state[1] * 0.5 + new, state[0] - new)


class State(NamedTuple):
    output: Tensor
    output_after: Tensor


@pytest.mark.parametrize("stem", ["product", "main", "exp", "memcpy", "size_t", "NAN", "uniform", "RESIZED"])
def test_files_and_states_may_have_any_name(stem: str, tmp_path: Path) -> None:
    model, x = Named(), torch.randn(5, 2)
    truth = by_definition(model, x)
    if stem == "NAN":
        with pytest.raises(ValueError, match="begins every name"):
            lf.export(model, tmp_path / f"{stem}.c")
        return
    lf.export(model, tmp_path / f"{stem}.c")
    np.testing.assert_allclose(in_c(compiled(tmp_path, [tmp_path / f"{stem}.c"]), stem, x, 2), truth, atol=1e-6)
    lm = language_model("characters")
    lf.export(lm, tmp_path / f"{stem}.c", vocabulary=VOCABULARIES["characters"])
    compiled(tmp_path, [tmp_path / f"{stem}.c"])
    found = in_onnx(StepProgram.of(model), x[:, None])[0][:, 0]
    np.testing.assert_allclose(found, truth, atol=1e-6)


def test_text_is_read_and_written_as_in_python(tmp_path: Path) -> None:
    texts = ["to be\n", "我们学习语言。 to be, 学 a\n", "to\x85be\x1fto\ufeff be <eos> <unk> x\n\nto", "\ufeffto be"]
    for number, vocabulary in enumerate((Words.of(texts[1] * 2), Characters.of("".join(texts)), Bytes())):
        model = recurrent_lm(vocabulary.size, [lf.Elman(3, 3)], 3)
        path = tmp_path / f"m{number}.mjs"
        lf.export(model, path, vocabulary=vocabulary)
        code = f"console.log(JSON.stringify({json.dumps(texts)}.map((t) => [encode(t), decode(encode(t))])));"
        for text, (ids, again) in zip(texts, node(path, "encode, decode", code), strict=True):
            assert ids == vocabulary.beginning(text).tolist()
            assert again == vocabulary.decode(ids)


def test_half_precision_that_does_not_suffice(tmp_path: Path) -> None:
    model = lf.GRU(3, 5)
    with torch.no_grad():
        model.b[0] = -1e9
    with pytest.raises(ValueError, match=r"half cannot hold 1e\+09"):
        lf.export(model, tmp_path / "m.js", half=True)


# ------------------------------------------------------------------ what cannot be


class Drawn(lf.Transition):
    input_size = 3

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h + torch.randn_like(h)


@pytest.mark.parametrize(
    ("model", "path", "options", "message"),
    [
        (lf.GRU(3, 5), "m.py", {}, "does not end in the name of a language: type one of .c"),
        (lf.GRU(3, 5), "my model.c", {}, "begins every name of the C code"),
        (lf.GRU(3, 5), "m.c", {"half": True}, "half has no effect in C: it is for JavaScript"),
        (lf.GRU(3, 5), "m.js", {"lengths": True}, "lengths has no effect in JavaScript: it is for ONNX"),
        (lf.GRU(3, 5), "m.onnx", {"lengths": True, "one_step": True}, "one step has no length"),
        (lf.GRU(3, 5), "m.js", {"vocabulary": Bytes()}, "goes with a language model that reads so many"),
        (Drawn(), "m.js", {"x": torch.zeros(1, 3)}, "Drawn cannot be exported: it draws random numbers"),
        (RandomStep([("add", 0, 1)], 4, 1), "m.js", {}, "does not say how large x is"),
    ],
)
def test_what_cannot_be_exported(model: Any, path: str, options: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        lf.export(model, tmp_path / path, **options)
    assert [*tmp_path.iterdir()] == []


# ------------------------------------------------------------------ the page on it

PAGE = Path(__file__).parent.parent / "docs" / "export.md"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The blocks of the page by language, and a folder in which its Python has run."""
    blocks: dict[str, list[str]] = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S):
        blocks.setdefault(language, []).append(code)
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch, torch.random.fork_rng(devices=[]):
        patch.chdir(folder)
        namespace: dict[str, Any] = {}
        for code in blocks["python"]:
            exec(code, namespace)
    return blocks | {"folder": folder}


def test_an_exported_run(page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rhyme.txt").write_text("the cat sat on the mat\n" * 80)
    trained = ["train", "rhyme.txt", "--out", "run", "--hidden", "8", "--epochs", "0.2", "--streams", "4", "-q"]
    worked(*trained)
    said = worked("export", "run", "--to", "cat.js")
    assert re.fullmatch(r"cat.js \(\d+ kB\)\n", said)
    text = node(tmp_path / "cat.js", "create", "console.log(JSON.stringify(create().generate('the ', 9)))")
    assert len(text) == 9
    assert worked("export", "run", "--to", "cat.c", "--weights-beside").count("\n") == 3
    compiled(tmp_path, [tmp_path / "cat.c"])
    size = (tmp_path / "cat.bin").stat().st_size
    worked("export", "run", "--to", "cat.onnx")
    assert (tmp_path / "cat.onnx").stat().st_size < size + 20_000
    refused("--to", "export", "run")
    refused("does not end in the name of a language", "export", "run", "--to", "cat.txt")
    refused("half has no effect in C", "export", "run", "--to", "cat.c", "--half")
    refused("one-step", "export", "run", "--to", "cat.onnx", "--one-step", "--lengths")
    worked("train", "rhyme.txt", "--out", "window", "--model", "window", "--hidden", "8", "--epochs", "0.1", "-q")
    refused("cannot", "export", "window", "--to", "cat.js")


def test_the_c_of_the_page_prints_what_python_prints(page: dict[str, Any]) -> None:
    if CC is None:
        pytest.skip("no C compiler")
    (page["folder"] / "main.c").write_text(page["c"][0])
    done = subprocess.run(page["sh"][0], shell=True, cwd=page["folder"], capture_output=True, text=True, check=True)
    assert done.stdout == page["text"][0]
    (page["folder"] / "write.c").write_text(page["c"][1])
    assert CC is not None
    command = [CC, *STRICT, "write.c", "bard.c", "-o", "bard", "-lm"]
    subprocess.run(command, cwd=page["folder"], check=True)
    written = subprocess.run(["./bard"], cwd=page["folder"], capture_output=True, text=True, check=True).stdout
    assert len(written) == 20


def test_the_javascript_of_the_page_writes(page: dict[str, Any]) -> None:
    if NODE is None:
        pytest.skip("no node")
    (page["folder"] / "write.mjs").write_text(page["js"][0])
    (page["folder"] / "package.json").write_text('{"type": "module"}')
    done = subprocess.run([NODE, "write.mjs"], cwd=page["folder"], capture_output=True, text=True, check=True)
    assert done.stdout == "20\n"
