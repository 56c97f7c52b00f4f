"""Looped: the compiled step as a lean Python loop over torch's own operations, forwards and backwards."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopfold.engines.base import Engine, Recurrence
from loopfold.engines.compiled import Call, Gradients, Kernel, Saved, compiled_refusal, run_compiled
from loopfold.engines.programs import Program
from loopfold.states import State
from loopfold.stepgraph.loop import Value, ordered


@dataclass(frozen=True)
class Looped(Engine):
    """Hoisted, with the library's products and a hand-scheduled backward pass; any device, any floating dtype.

    Inside the loop is only what a step needs of the one before; parameter gradients are one product at the end.
    Agrees with `Sequential` to rounding: sums are taken in another order.
    """

    def refusal(self, recurrence: Recurrence) -> str | None:
        return compiled_refusal(recurrence)

    def run(self, recurrence: Recurrence) -> State:
        return run_compiled(self, _LoopedKernel(), recurrence)


class _LoopedKernel(Kernel):
    def forward(
        self, program: Program, call: Call, constants: list[Tensor], inputs: list[Tensor], state: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        loop = program.loop
        kept = program.kept if call.record else ()
        out = [*loop.emitted, *kept]
        masked = call.lengths is not None
        key = ("looped forward", call.record, masked)
        if key not in program.made:
            carried = [(f"state{i}", v) for i, v in zip(loop.carried, loop.next, strict=True)]
            program.made[key] = _generate(carried, out, "state", masked)
        sequences = {f"input{i}": t for i, t in enumerate(inputs)}
        rows = {f"state{i}": t for i, t in zip(loop.carried, state, strict=True)}
        found, _ = program.made[key](call, sequences, _named(constants), rows, state[0], False)
        taken = {t.untyped_storage().data_ptr() for t in (*inputs, *state)}
        for i, t in enumerate(found):  # a value that is a part of an input, or of another, must not share its memory
            found[i] = t.clone() if t.untyped_storage().data_ptr() in taken else t
            taken.add(found[i].untyped_storage().data_ptr())
        return found[: len(loop.emitted)], found[len(loop.emitted) :]

    def backward(self, program: Program, call: Call, saved: Saved, incoming: list[Tensor | None]) -> Gradients:
        loop, reverse, state, emitted = program.loop, program.reverse(incoming), saved.state, saved.emitted
        out = [*reverse.stored(), *[g for _, g in reverse.rows]]
        masked = call.lengths is not None
        given = {v: f"given{k}" for k, v in enumerate((*loop.emitted, *program.kept))}
        key = ("looped backward", tuple(g is not None for g in incoming), masked)
        if key not in program.made:
            carries = [(f"carry{k}", v) for k, v in enumerate(reverse.carries)]
            program.made[key] = _generate(carries, out, "carry", masked, given)
        sequences: dict[str, Tensor] = {f"given{k}": t for k, t in enumerate((*emitted, *saved.kept))}
        sequences |= {f"input{i}": t for i, t in enumerate(saved.inputs) if t is not None}
        sequences |= {f"incoming{k}": t for k, t in enumerate(incoming) if t is not None}
        for k, i in enumerate(loop.carried):
            sequences[f"state{i}"] = torch.cat([state[k][None], emitted[k][:-1]])
        rows = {f"carry{k}": torch.zeros_like(s) for k, s in enumerate(state)}
        found, last = program.made[key](call, sequences, _named(saved.constants), rows, state[0], True)
        stored = len(reverse.stored())
        rows_ = [g.sum((0, 1)) for g in found[stored:]]
        return Gradients([g.clone() for g in last], found[:stored], rows_)  # a row may be part of a sequence


def _named(constants: list[Tensor]) -> dict[str, Tensor]:
    matrices = {f"M{i}": t for i, t in enumerate(constants)}
    return matrices | {f"T{i}": t.T for i, t in enumerate(constants) if t.dim() == 2}


# ------------------------------------------------------------------ one Python function per loop


def _generate(
    carried: list[tuple[str, Value]],
    out: list[Value],
    recurrent: str,
    masked: bool,
    given: dict[Value, str] | None = None,
) -> Callable[..., tuple[list[Tensor], list[Tensor]]]:
    """Write a function in three parts: what needs no carried row (all steps at once), the loop, and what is left.

    `carried`    (name of the row before a step, its value after the step)
    `out`        the values wanted as sequences
    `given`      values that come as sequences, by name
    """
    given = given or {}
    roots = [v for _, v in carried]
    order = ordered([*roots, *out], stop=given)
    moving = _depends(order, recurrent, given)
    in_loop = moving & {*ordered(roots, stop=given), *(v for v in order if v.op == recurrent)}
    loop = [v for v in order if v in in_loop]
    after = [v for v in order if v in moving and v not in in_loop]
    before = [v for v in order if v not in moving and v.op != "number"]
    wanted = set(out) | {a for v in after for a in v.args}
    stored = [v for v in loop if v in wanted]

    names = {v: f"v{i}" for i, v in enumerate(order)}
    read = {*roots, *(a for v in loop for a in v.args)}
    sequences = [v for v in before if v in read and v.op != "constant"]  # a constant is the same at every step
    name_now = {v: f"{names[v]}_t" for v in sequences}

    def leaf(v: Value) -> str | None:
        if v in given:
            return given[v]
        if v.op in ("input", "state", "incoming", "carry"):
            return f"{v.op}{v.index}"
        return f"M{v.index}" if v.op == "constant" else None

    lines = ["def run(call, S, C, R, like, backwards):", "    T, B = call.steps, call.batch"]
    lines += [f"    {names[v]} = {_source(v, leaf, names, '(T, B)')}" for v in before]
    lines += [f"    {names[v]}_s = {names[v]}.expand(T, B, {v.width}).unbind(0)" for v in sequences]
    dtypes = {v: ", dtype=torch.bool" if v.is_bool else "" for v in stored}
    lines += [f"    {names[v]}_b = like.new_empty(T, B, {v.width}{dtypes[v]})" for v in stored]
    lines += [f"    {names[v]}_o = {names[v]}_b.unbind(0)" for v in stored]
    rows = [f"row{k}" for k in range(len(carried))]
    lines += [f"    {row} = R['{name}']" for row, (name, _) in zip(rows, carried, strict=True)]
    if masked:
        lines += ["    t, lengths = torch.arange(T, device=like.device), call.lengths.to(like.device)"]
        lines += ["    mask = t[:, None, None] < lengths[:, None]"]
        lines += ["    alive, zero = mask.unbind(0), like.new_zeros(())"]
    lines += ["    for t in range(T - 1, -1, -1) if backwards else range(T):"]
    lines += [f"        {name_now[v]} = {names[v]}_s[t]" for v in sequences]
    row_of = {name: row for row, (name, _) in zip(rows, carried, strict=True)}
    inside = {**names, **name_now}

    def here(v: Value) -> str | None:
        if v.op == recurrent and v not in given:
            return row_of[f"{v.op}{v.index}"]
        return None

    skip = _fused_products(loop, in_loop)
    for v in loop:
        if v in skip.values() and v not in stored:
            continue
        target = f"{names[v]}_o[t]" if v in stored and not masked else None
        lines.append(f"        {names[v]} = {_source(v, here, inside, '(B,)', target, skip.get(v))}")
    if masked:
        for v in stored:
            keep = f"({names[v]} & alive[t]" if v.is_bool else f"where(alive[t], {names[v]}, zero"
            lines.append(
                f"        {names[v]}_o[t].copy_{keep})" if v.is_bool else f"        torch.{keep}, out={names[v]}_o[t])"
            )
    after_step = [inside[v] if v.op != "number" else f"like.new_full((B, 1), {v.index!r})" for v in roots]
    updates = [
        f"torch.where(alive[t], {value}, {row})" if masked else value
        for row, value in zip(rows, after_step, strict=True)
    ]
    lines += [f"        {', '.join(rows)}{',' * (len(rows) == 1)} = {', '.join(updates)}," if rows else "        pass"]
    final = {**names, **{v: f"{names[v]}_b" for v in stored}}
    for v in after:
        lines.append(f"    {names[v]} = {_source(v, leaf, final, '(T, B)')}")
    results = [_whole(v, final, masked and v not in stored) for v in out]
    lines.append(f"    return [{', '.join(results)}], [{', '.join(rows)}]")
    namespace: dict[str, Any] = {"torch": torch, "inf": math.inf, "nan": math.nan}
    exec(compile("\n".join(lines), "<loopfold looped>", "exec"), namespace)
    return namespace["run"]


def _whole(v: Value, names: dict[Value, str], mask: bool) -> str:
    full = f"{names[v]}.expand(T, B, {v.width})" if v.op != "number" else f"like.new_full((T, B, 1), {v.index!r})"
    return f"torch.where(mask, {full}, 0)" if mask else full


def _depends(order: list[Value], recurrent: str, given: dict[Value, str]) -> set[Value]:
    found: set[Value] = set()
    for v in order:
        if v not in given and (v.op == recurrent or any(a in found for a in v.args)):
            found.add(v)
    return found


def _fused_products(loop: list[Value], in_loop: set[Value]) -> dict[Value, Value]:
    """{sum: product} where a product is only added to something: one addmm."""
    uses: dict[Value, int] = {}
    for v in loop:
        for a in v.args:
            uses[a] = uses.get(a, 0) + 1
    fused = {}
    for v in loop:
        if v.op == "add":
            for a in v.args:
                other = v.args[1] if a is v.args[0] else v.args[0]
                alone = a in in_loop and uses[a] == 1 and other is not a
                if a.op == "matmul" and alone and other.width == a.width and other.op != "number":
                    fused[v] = a
                    break
    return fused


_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "=="}
_INFIX |= {"ne": "!=", "and": "&", "or": "|"}
_WITH_OUT = {"add", "sub", "mul", "div", "maximum", "minimum"}
_FUNCTIONS = {"tanh", "sigmoid", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "abs", "sign", "sin"}
_FUNCTIONS |= {"cos", "erf", "neg"}


def _source(
    v: Value,
    leaf: Callable[[Value], str | None],
    names: dict[Value, str],
    lead: str,
    target: str | None = None,
    product: Value | None = None,
) -> str:
    """The Python expression of one value; with `target` it is also written there."""
    known = leaf(v)
    if known is not None:
        store = {"i": "S", "s": "S", "g": "S", "M": "C"}.get(known[0])
        found = f"{store}['{known}']" if store else known
        return found if target is None else f"{target}.copy_({found})"

    def name(a: Value) -> str:
        inner = leaf(a) if a.op != "constant" else None
        if inner is not None and inner.startswith("row"):
            return inner
        return repr(a.index) if a.op == "number" else names[a]

    tensors = [a for a in v.args if a.op != "number"]
    into = f", out={target}" if target else ""
    if product is not None:
        other = next(a for a in v.args if a is not product)
        return f"torch.addmm({name(other)}, {name(product.args[0])}, {_matrix(product)}{into})"
    if v.op == "matmul":
        return f"torch.matmul({name(v.args[0])}, {_matrix(v)}{into})"
    if v.op in _FUNCTIONS and tensors:
        return f"torch.{v.op}({name(v.args[0])}{into})"
    if v.op in _WITH_OUT and len(tensors) == 2 and target:
        return f"torch.{v.op}({', '.join(map(name, v.args))}{into})"
    if v.op == "cat":
        parts = [f"like.new_full((*{lead}, 1), {a.index!r})" if a.op == "number" else name(a) for a in v.args]
        return f"torch.cat([{', '.join(parts)}], -1{into})"
    plain = _plain(v, [name(a) for a in v.args], lead, bool(tensors))
    return f"{target}.copy_({plain})" if target else plain


def _plain(v: Value, args: list[str], lead: str, tensors: bool) -> str:
    if not tensors:  # an operation on numbers alone; as a tensor it has a dtype
        args = [f"like.new_tensor({a})" for a in args]
    if v.op in _INFIX:
        return f"({args[0]} {_INFIX[v.op]} {args[1]})"
    if v.op in _FUNCTIONS:
        return f"torch.{v.op}({args[0]})"
    if v.op in ("maximum", "minimum"):
        return f"torch.{v.op}({', '.join(map(_typed, args))})"
    if v.op == "relu":
        return f"torch.relu({args[0]})"
    if v.op == "where":
        return f"torch.where({args[0]}, {_typed(args[1])}, {_typed(args[2])})"
    if v.op == "pow":
        return f"({args[0]} ** {v.index!r})"
    if v.op == "not":
        return f"~{args[0]}"
    if v.op == "detach":
        return args[0]
    if v.op == "expand":
        return f"{args[0]}.expand(*{lead}, {v.width})"
    if v.op == "slice":
        return f"{args[0]}.narrow(-1, {v.index}, {v.width})"
    if v.op == "sum":
        return f"{args[0]}.sum(-1, keepdim=True)"
    assert v.op in ("amax", "amin"), v.op
    return f"{args[0]}.{v.op}(-1, keepdim=True)"


def _matrix(product: Value) -> str:
    i, transposed = product.index
    return f"C['{'T' if transposed else 'M'}{i}']"


def _typed(a: str) -> str:
    """A number as a tensor, where torch takes no plain one."""
    literal = a[0].isdigit() or a[0] == "-" or a in ("inf", "nan")
    return f"like.new_tensor({a})" if literal else a
