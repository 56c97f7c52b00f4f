"""Where rules are entered, by the names of torch's operations; those that are the loop's own need no further one."""

from collections.abc import Callable
from typing import Any

from loopfold.stepgraph.graph import Node
from loopfold.stepgraph.loop import Value
from loopfold.stepgraph.ops import OPS, Op

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}  # name of the operation -> rule(hoist, node, *arguments)


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Enter what follows as the rule of these operations."""

    def enter(made: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, made))
        return made

    return enter


def plain(op: Op) -> Rule:
    """torch's operation is one of ours."""

    def made(hoist: Any, node: Node, *args: Any) -> Value:
        rows = [hoist.condition(a) if i < op.conditions else hoist.row(a) for i, a in enumerate(args)]
        return hoist.builder.make(op.name, *rows)

    return made


OWN = {name: op for op in OPS.values() for name in op.aten}  # torch's operations that are ours
for _name, _op in OWN.items():
    RULES[_name] = plain(_op)  # those that take more than rows have rules of their own, which come later
