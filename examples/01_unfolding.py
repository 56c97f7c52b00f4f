"""Folded and unfolded are the same function.

A recurrence says how one state follows from the one before: s(t) = f(s(t-1)), or h(t) = f(h(t-1), x(t)) where a signal
drives it (book 10.1 to 10.5). Applied again and again, it becomes an expression with no loop, f(f(f(s))), as long as
the sequence. Both must give the same values and the same gradients, by whatever engine the loop is run. The drawing
unfolds in the same way: the circuit has one node for each part and a black square for the delay of one step, the
unfolded graph has one node for each variable at each step. The parameters are those of f, so their number does not
depend on τ, the number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import loopfold as lf

ENGINES = [lf.Sequential(), lf.Looped(), lf.FusedCPU(), lf.Auto()]


@dataclass
class Result:
    system: float  # |f(f(f(s))) - unfold(f, steps=3)|
    engines: dict[str, tuple[float, float]]  # the largest difference of a state, and of a gradient, from the hand's
    sizes: dict[int, tuple[int, int, int | None]]  # by τ: parameters of f, of a layer over x(1…τ); nodes drawn


def f(s: Tensor) -> Tensor:
    """A dynamical system with no input (book 10.1)."""
    return torch.cos(s)


def by_hand(cell: lf.Elman, x: Tensor) -> Tensor:
    """Three steps with no loop, as in the book's (10.3): h(3) = f(f(f(h(0), x(1)), x(2)), x(3))."""
    return cell(cell(cell(cell.initial_state(x.shape[1]), x[0]), x[1]), x[2])


def gradients(cell: lf.Elman, h: Tensor) -> list[Tensor]:
    """Those of an arbitrary function of the last state."""
    return list(torch.autograd.grad(h.square().sum(), list(cell.parameters())))


def nodes(drawing: lf.Drawing) -> int:
    return drawing.dot().count("shape=")


def experiment(n_in: int = 3, n: int = 16, batch: int = 5, lengths: Sequence[int] = (1, 3, 7, 1000)) -> Result:
    torch.manual_seed(0)
    s = torch.randn(batch, 1, dtype=torch.float64)
    system = (f(f(f(s))) - lf.unfold(f, steps=3, state=s).last).abs().max()

    cell = lf.Elman(n_in, n, dtype=torch.float64)
    x = torch.randn(3, batch, n_in, dtype=torch.float64)
    h = by_hand(cell, x)
    engines = {}
    for engine in ENGINES:
        last = lf.unfold(cell, x, engine=engine).last
        pairs = zip(gradients(cell, last), gradients(cell, by_hand(cell, x)), strict=True)
        engines[type(engine).__name__] = (
            float((last - h).detach().abs().max()),
            max(float((ours - hand).abs().max()) for ours, hand in pairs),
        )

    sizes = {}
    for tau in lengths:
        assert lf.unfold(cell, torch.randn(tau, 1, n_in, dtype=torch.float64)).hidden.shape == (tau, 1, n)
        flat = torch.nn.Linear(tau * n_in, n)  # what reads the whole past at once grows with it
        drawn = nodes(lf.draw(cell, steps=tau)) if tau < 8 else None  # a longer graph is drawn with a gap
        sizes[tau] = (_count(cell), _count(flat), drawn)
    return Result(float(system), engines, sizes)


def _count(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def table(result: Result) -> str:
    lines = [f"f(f(f(s))) by hand and lf.unfold(f, steps=3) differ by {result.system:.1e}", ""]
    lines += ["three steps of lf.Elman by hand, and by   largest difference of h   of a gradient"]
    lines += [f"{name:<40}  {value:>23.1e}  {grad:>14.1e}" for name, (value, grad) in result.engines.items()]
    lines += ["", "steps τ   parameters of f   of one layer over x(1…τ)   nodes when unfolded"]
    lines += [
        f"{tau:>7}   {f:>15,}   {g:>24,}   {n or 'drawn with a gap':>19}" for tau, (f, g, n) in result.sizes.items()
    ]
    return "\n".join(lines)


def picture(result: Result) -> lf.Drawing:
    """The circuit on the left, and on the right what it unfolds to."""
    model = lf.SequenceToSequence(lf.Elman(3, 16), outputs=4)
    return lf.beside(lf.draw(model), lf.draw(model, steps=3))


def found(result: Result) -> str:
    rounding = 1e-12
    compiled = max(max(pair) for pair in result.engines.values())
    tau, (parameters, flat, _) = max(result.sizes.items())
    return f"""\
claim     Folded and unfolded give the same values and gradients
holds if  all differ by less than {rounding}
verdict   {"holds" if max(result.system, compiled) < rounding else "does not hold here"}
figures   by hand and by `unfold` differ by {result.system:.1e}, compiled by at most {compiled:.1e}

claim     The number of parameters does not depend on the length
holds if  f has the same number at every τ
verdict   {"holds" if len({f for f, _, _ in result.sizes.values()}) == 1 else "does not hold here"}
figures   {parameters} for f at τ = {tau}; one layer over the whole past has {flat:,}

Compiled engines add in another order, so they may differ by what rounding does."""


def main() -> None:
    result = experiment()
    print(table(result), found(result), sep="\n\n")
    picture(result).save(Path(__file__).parent / "pictures" / "01_unfolding.svg")


if __name__ == "__main__":
    main()
