"""The unfolded graph: one node per variable per step. It can be run, forwards and backwards."""

from collections import defaultdict
from dataclasses import dataclass
from graphlib import TopologicalSorter
from typing import Any

import torch
from torch import Tensor

from loopfold.drawing.circuit import Circuit, Edge, Role, Variable
from loopfold.states import has_a_gradient, in_double
from loopfold.wiring import When


@dataclass(frozen=True)
class Moment:
    """A variable at a step: 1 … τ; 0, or τ + 1 for what is read backwards, is before the first. Once for all: None."""

    variable: Variable
    t: int | None


@dataclass(frozen=True)
class Arrow:
    """An edge of the circuit at one step."""

    edge: Edge
    source: Moment
    target: Moment


@dataclass(frozen=True)
class Gradients:
    """The size of ∂L/∂ at every node, and of the part of it that comes back through every edge; absent where none."""

    moments: dict[Moment, float]
    arrows: dict[Arrow, float]
    loss: float


class Unfolded:
    """`circuit`, unfolded for a number of steps: `tau` of every phase, or of each its own."""

    def __init__(self, circuit: Circuit, tau: int | tuple[int, ...]) -> None:
        self.circuit = circuit
        self.taus = tau if isinstance(tau, tuple) else (tau, tau)
        self.arrows: list[Arrow] = []
        self.moments: dict[Moment, None] = {}
        for variable in circuit.variables:
            for t in self._steps(variable):
                self.moments[Moment(variable, t)] = None
        for edge in circuit.edges:
            for t in self._steps(edge.target):
                source = self._source(edge, t)
                if source is not None:
                    self.moments[source] = None
                    self.arrows.append(Arrow(edge, source, Moment(edge.target, t)))

    def tau(self, variable: Variable) -> int:
        return self.taus[variable.phase]

    def _steps(self, variable: Variable) -> list[int | None]:
        if variable.when is When.ONCE:
            return [None]
        tau = self.tau(variable)
        return [tau] if variable.when is When.LAST else list(range(1, tau + 1))

    def _source(self, edge: Edge, t: int | None) -> Moment | None:
        """What an edge into step t comes from; None where nothing has been fed back yet."""
        source, target = edge.source, edge.target
        if source.when is When.ONCE:
            return Moment(source, None)
        if source.when is When.EVERY and target.when is not When.EVERY:
            return Moment(source, self.end(source))
        assert t is not None
        before = t - edge.lag
        if 1 <= before <= self.tau(source) or source.initial is not None:
            return Moment(source, before)
        return None

    def end(self, variable: Variable) -> int:
        """The step that a variable's sequence ends at."""
        return 1 if variable.backwards else self.tau(variable)

    # ------------------------------------------------------------------ running it

    def gradients(self, given: dict[Variable, Tensor], batch: int) -> Gradients:
        """Back-propagate L = Σ_t L(t) through this very graph."""
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
            values, carried = self._run(given, batch)
            losses = [value for moment, value in values.items() if moment.variable.role is Role.LOSS]
            total = torch.stack(losses).sum()
        found = _norms(total, [*values.items(), *carried.items()])
        return Gradients(
            {key: size for key, size in found.items() if isinstance(key, Moment)},
            {key: size for key, size in found.items() if isinstance(key, Arrow)},
            float(total.detach()),
        )

    def _run(self, given: dict[Variable, Tensor], batch: int) -> tuple[dict[Moment, Any], dict[Arrow, Any]]:
        """The value of every node, each from the edges into it, and what every edge carried; `given` are the data."""
        into: dict[Moment, dict[Edge, Arrow]] = defaultdict(dict)
        for arrow in self.arrows:
            into[arrow.target][arrow.edge] = arrow
        order = TopologicalSorter({m: [a.source for a in into[m].values()] for m in self.moments}).static_order()
        values: dict[Moment, Any] = {}
        carried: dict[Arrow, Any] = {}
        edges = {variable: self.circuit.into(variable) for variable in self.circuit.variables}
        for moment in order:
            variable = moment.variable
            if moment.t is not None and not 1 <= moment.t <= self.tau(variable):
                assert variable.initial is not None
                values[moment] = _marked(variable.initial(batch))
            elif variable in given:
                data = given[variable]
                values[moment] = _marked(data if variable.when is not When.EVERY else data[(moment.t or 1) - 1])
            else:
                parts: list[Any] = []
                for edge in edges[variable]:
                    if edge not in into[moment]:
                        parts.append(None)
                        continue
                    arrow = into[moment][edge]
                    value = values[arrow.source]
                    value = value if edge.form is None else edge.form(value)
                    # a copy for every edge, so that each has a gradient of its own
                    carried[arrow] = value.clone() if isinstance(value, Tensor) else value
                    parts.append(carried[arrow])
                values[moment] = self.circuit.rules[variable](parts, batch)
        return values, carried


def _marked(value: Tensor) -> Tensor:
    """Data as the start of a graph, so that gradients reach it."""
    value = value.detach().clone()
    return value.requires_grad_() if has_a_gradient(value) else value


def _norms(total: Tensor, items: list[tuple[Any, Any]]) -> dict[Any, float]:
    wanted = [(key, v) for key, v in items if isinstance(v, Tensor) and v.requires_grad]
    found = torch.autograd.grad(total, [v for _, v in wanted], allow_unused=True)
    return {key: float(in_double(g).norm()) for (key, _), g in zip(wanted, found, strict=True) if g is not None}
