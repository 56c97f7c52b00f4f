"""Back-propagation through time in JavaScript gives what torch gives, whatever the step is."""

import json
import random
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_export import NODE, OPERATIONS, language_model, node, of_tokens, stacked, steps
from test_random_steps import RandomStep
from torch import Tensor, nn

import loopfold as lf
from loopfold.engines.base import Recurrence
from loopfold.engines.compiled import as_row, given_to, parameters_of
from loopfold.engines.programs import program_of
from loopfold.engines.stepped import StepCode
from loopfold.exporting.javascript import JavaScriptWriter
from loopfold.exporting.program import StepProgram
from loopfold.onestep import one_step, start_of
from loopfold.states import leaves, map_state
from loopfold.stepgraph.graph import Refusal, compute

pytestmark = pytest.mark.skipif(NODE is None, reason="no node")
Made = tuple[nn.Module, Tensor]


def in_node(folder: Path, data: list[Any]) -> list[Any]:
    """What backward gives of each {name, x, gradients, last}; twice, the second time after other steps."""
    (folder / "data.json").write_text(json.dumps(data))
    (folder / "run.mjs").write_text(
        """import { readFileSync, writeFileSync } from "node:fs";
        const plain = (g) => g == null ? g : ArrayBuffer.isView(g) ? [...g].map(String)
          : Array.isArray(g) ? g.map(plain) : Object.values(g).map(plain);
        const found = [];
        for (const { name, x, gradients, last } of JSON.parse(readFileSync(new URL("data.json", import.meta.url)))) {
          const { create } = await import(`./${name}.mjs`);
          const model = create(), keys = Object.keys(model.state);
          const by = Object.fromEntries(keys.map((key, i) => [key, last[i]]));
          model.unfold([...x, ...x]);
          model.backward([...gradients, ...gradients], by);
          model.reset();
          const outputs = model.unfold(x), before = JSON.stringify(model.state);
          const { x: dx, states, weights } = model.backward(gradients, by);
          if (JSON.stringify(model.state) !== before) throw new Error("the state has moved");
          found.push({ outputs: plain(outputs), x: plain(dx), states: plain(states), weights: plain(weights) });
        }
        writeFileSync(new URL("found.json", import.meta.url), JSON.stringify(found));"""
    )
    assert NODE is not None
    done = subprocess.run([NODE, str(folder / "run.mjs")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "found.json").read_text())


class Truth:
    """By torch: the gradients of `Σ g(t)·o(t) + last·s(τ)` by x, by the first state, and by every parameter."""

    def __init__(self, model: nn.Module, x: Tensor, gradients: Tensor, last: list[Tensor]) -> None:
        f = one_step(model.network if isinstance(model, lf.RecurrentLM) else model, "export")
        dtype = gradients.dtype
        x = x if x.dtype == torch.int64 else x.to(dtype).requires_grad_()
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        state = start_of(f, 1, x[:1], None)
        first = [leaf.to(dtype).detach().requires_grad_() for leaf in leaves(state)]
        again = iter(first)
        run = lf.unfold(f, x[:, None], map_state(lambda _: next(again), state), engine=lf.Sequential())
        outputs = leaves(run.states if run.outputs is None else run.outputs)[0]
        self.outputs = outputs.detach().reshape(len(x), -1)
        loss = (outputs.reshape(len(x), -1) * gradients).sum()
        loss = loss + sum(((a.reshape(-1) * b).sum() for a, b in zip(leaves(run.last), last, strict=True)), 0)
        of = [*([x] if x.requires_grad else []), *first, *self.parameters]
        grads = torch.autograd.grad(loss, of, allow_unused=True) if loss.requires_grad else [None] * len(of)
        found = [torch.zeros_like(t) if g is None else g for t, g in zip(of, grads, strict=True)]
        self.x = found.pop(0) if x.requires_grad else None
        self.first, self.of_parameters = found[: len(first)], found[len(first) :]


def through_weights(model: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """The gradients by the parameters, from those by a program's weights, which torch computes from them.

    What is computed from the parameters before the first step is not JavaScript's.
    """
    f = one_step(model.network if isinstance(model, lf.RecurrentLM) else model, "export")
    parameters = [p for p in model.parameters() if p.requires_grad]
    start = start_of(f, 1, x[:1], None)
    like = leaves(start)[0]
    recurrence = Recurrence(f, x[:1, None], 1, start, None, None, None)
    found = program_of(recurrence)
    code = StepCode(found.program.graph)
    values = given_to(recurrence, found, parameters_of(recurrence, found))
    tables = [table for _, table in code.reads if table is not None]
    compute(code.graph, [*(n for r in code.loop.constants for n in r.nodes()), *tables], values, rows=1)
    made = [as_row(recipe.make(values), like, like.dtype) for recipe in code.loop.constants]
    made += [values[table] for table in tables] + [leaf.reshape(-1) for leaf in leaves(start)]
    parts = weights.split([tensor.numel() for tensor in made])
    with_grad = [(t, g.reshape(t.shape).to(t.dtype)) for t, g in zip(made, parts, strict=True) if t.requires_grad]
    if not with_grad:
        return [torch.zeros_like(p) for p in parameters]
    tensors, gradients = zip(*with_grad, strict=True)
    grads = torch.autograd.grad(tensors, parameters, gradients, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def close(folder: Path, makes: dict[str, Callable[[], Made]]) -> int:
    """Each model's gradients in JavaScript are those of torch; says how many models were refused."""
    data, checks, refused = [], [], 0
    for i, (name, make) in enumerate(makes.items()):
        torch.manual_seed(i)
        model, x = make()
        try:
            program = StepProgram.of(model, x[:1])
        except Refusal:
            refused += 1
            continue
        (folder / f"{name}.mjs").write_text(JavaScriptWriter(program, None, backward=True).source())
        gradients = torch.randn(len(x), program.outputs[0].size)
        last = [torch.randn(leaf.size) for leaf in program.state]
        data.append(
            {"name": name, "x": x.tolist(), "gradients": gradients.tolist(), "last": [g.tolist() for g in last]}
        )
        checks.append((name, model, x, gradients, last))
    for (name, model, x, gradients, last), found in zip(checks, in_node(folder, data), strict=True):
        by_weights = through_weights(model, x, torch.tensor([float(w) for w in found["weights"]]))
        rough = Truth(model, x, gradients, last)
        model.double()
        truth = Truth(model, x, gradients.double(), [g.double() for g in last])
        first = [[float(v) for v in leaf] for leaf in found["states"][0]]
        pairs = [(a, b, torch.tensor(c)) for a, b, c in zip(truth.first, rough.first, first, strict=True)]
        if truth.x is not None and rough.x is not None:
            pairs.append((truth.x, rough.x, torch.tensor([[float(v) for v in row] for row in found["x"]])))
        pairs += zip(truth.of_parameters, rough.of_parameters, by_weights, strict=True)
        for k, (exact, by_torch, by_node) in enumerate(pairs):
            error = (by_node.double().reshape(exact.shape) - exact).abs().max()
            alone = (by_torch.double() - exact).abs().max()  # what float32 by itself makes of it
            bound = max(2e-5 * max(1.0, exact.abs().max().item()), 20 * alone.item())
            assert error <= bound, (name, k, error.item(), bound, type(model))
    return refused


def test_every_kind_of_step(tmp_path: Path) -> None:
    makes = {f"m{i}": make for i, make in enumerate(steps().values())}
    assert close(tmp_path, makes) < len(makes) / 10


def test_random_steps(tmp_path: Path) -> None:
    def make(seed: int) -> Made:
        choose = random.Random(seed)
        program = [
            (choose.choice(OPERATIONS), choose.randrange(50), choose.randrange(50))
            for _ in range(choose.randrange(1, 9))
        ]
        n = choose.choice([4, 5, 6])
        return RandomStep(program, n, choose.randrange(1, 4)), torch.randn(choose.choice([1, 2, 5]), n)

    assert close(tmp_path, {f"m{i}": partial(make, i) for i in range(40)}) < 4


class Timed(lf.Transition):
    """It starts from a parameter, reads the number of the step, and gives more than one number beside its states."""

    def __init__(self) -> None:
        super().__init__()
        self.input_size, self.start = 3, nn.Parameter(torch.tensor([0.3, -0.7, 0.2]))

    def initial_state(self, batch: int) -> tuple[Tensor, Tensor]:
        return self.start.expand(batch, 3), self.start[:1].expand(batch, 1)

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor, t: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, last = state
        h = torch.tanh(h * self.start + x * torch.cos(t))
        return h[:, :2] * last, (h, x[:, :1] * last)


@pytest.mark.parametrize("tau", [1, 7])
def test_layers_readouts_and_tokens(tau: int, tmp_path: Path) -> None:
    makes: dict[str, Callable[[], Made]] = {
        "stacked": lambda: (stacked(), torch.randn(tau, 3)),
        "tokens": lambda: (of_tokens(), torch.randint(9, (tau,))),
        "tied": lambda: (language_model("bytes").eval(), torch.randint(5, (tau,))),
        "frozen": lambda: (lf.GRU(3, 5).requires_grad_(False), torch.randn(tau, 3)),
    }
    assert close(tmp_path, makes) == 0


def test_a_learned_start_and_the_number_of_the_step(tmp_path: Path) -> None:
    model, x, last = Timed(), torch.randn(6, 3, requires_grad=True), torch.randn(3)
    run = lf.unfold(model, x[:, None], engine=lf.Sequential())
    assert run.outputs is not None
    loss = run.outputs.square().sum() / 2 + (leaves(run.last)[0][0] * last).sum()
    dx, dstart = torch.autograd.grad(loss, (x, model.start))
    lf.export(model, tmp_path / "m.mjs", backward=True)
    found = node(
        tmp_path / "m.mjs",
        "create",
        f"""const model = create(), outputs = model.unfold({x.tolist()});
        const back = model.backward(outputs, {{ [Object.keys(model.state)[0]]: {last.tolist()} }});
        console.log(JSON.stringify([back.x.map((g) => [...g]), [...back.weights]]));""",
    )
    torch.testing.assert_close(torch.tensor(found[0]), dx, atol=1e-5, rtol=1e-5)
    weights, n = torch.tensor(found[1]), len(StepProgram.of(model).numbers())
    assert len(weights) == n
    torch.testing.assert_close(sum_of_starts(model, weights), dstart, atol=1e-5, rtol=1e-5)


def sum_of_starts(model: Timed, weights: Tensor) -> Tensor:
    """The row that is multiplied with h, and the two first states, are all made of `start`."""
    row, h, last = weights[:3], weights[-4:-1], weights[-1:]
    assert torch.equal(StepProgram.of(model).numbers()[:3], model.start)
    return row + h + torch.cat([last, torch.zeros(2)])


def test_what_is_refused(tmp_path: Path) -> None:
    lf.export(lf.GRU(2, 3), tmp_path / "m.mjs", backward=True)
    said = node(
        tmp_path / "m.mjs",
        "create",
        """const model = create(), said = [];
        model.unfold([[1, 2]]);
        for (const given of [[], [[1, 2]]]) try { model.backward(given); } catch (error) { said.push(error.message); }
        console.log(JSON.stringify(said));""",
    )
    assert said == ["got gradients for 0 steps; 1 were unfolded", "a gradient must be 3 numbers; got 2"]
    with pytest.raises(lf.OptionError, match="backward has no effect in C"):
        lf.export(lf.GRU(2, 3), tmp_path / "m.c", backward=True)


def test_several_parts_of_x(tmp_path: Path) -> None:
    """A context is one of them, at every step."""

    class Looking(lf.Transition):
        def __init__(self) -> None:
            super().__init__()
            self.input_size, self.W = 3, nn.Parameter(torch.randn(3, 3) / 2)

        def initial_state(self, batch: int) -> Tensor:
            return self.W.new_zeros(batch, 3)

        def forward(self, h: Tensor, x: Tensor, context: Tensor) -> Tensor:
            scores = torch.softmax((context * h.unsqueeze(1)).sum(-1), -1)
            return torch.tanh(x + (scores.unsqueeze(-1) * context).sum(1) @ self.W)

    torch.manual_seed(0)
    model, x = Looking(), torch.randn(5, 3, requires_grad=True)
    context = torch.randn(1, 4, 3, requires_grad=True)
    hidden = lf.unfold(model, x[:, None], context=context, engine=lf.Sequential()).hidden
    dx, dcontext, dW = torch.autograd.grad(hidden.square().sum() / 2, (x, context, model.W))
    lf.export(model, tmp_path / "m.mjs", context=context.detach(), backward=True)
    found = node(
        tmp_path / "m.mjs",
        "create",
        f"""const model = create(), context = {context.flatten().tolist()};
        const back = model.backward(model.unfold({x.tolist()}.map((x) => [x, context])));
        console.log(JSON.stringify([back.x.map((row) => row.map((part) => [...part])), [...back.weights]]));""",
    )
    torch.testing.assert_close(torch.tensor([row[0] for row in found[0]]), dx, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        torch.tensor([row[1] for row in found[0]]).sum(0), dcontext.flatten(), atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        torch.tensor(found[1])[:9].sort().values, dW.flatten().sort().values, atol=1e-5, rtol=1e-5
    )
