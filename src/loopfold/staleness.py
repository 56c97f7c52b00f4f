"""Is all that a trace has fixed still as it was? Asked before every step that is taken by itself, in a microsecond.

`fingerprint` compares what things are; here it is only asked whether each is the very same object as before, which is
far quicker. Where one is not, all is looked at again, and often nothing of it matters.
"""

import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from loopfold.surroundings import OF_TORCH, Walk, fingerprint
from loopfold.undoing import ARRAY, CELL, GLOBALS, MAPPING, SEQUENCE, SET, SET_ON, is_foreign

_MOST = 48  # things in a list, or attributes of an object, that are asked for one by one


def unaltered(
    f: nn.Module, in_place: Iterable[Tensor], versions: Iterable[Tensor], around: Iterable[nn.Module] = ()
) -> tuple[Callable[[], bool], list[str]]:
    """A function that tells whether `f` is as it is now; and the names of what takes it long.

    `in_place`  tensors whose memory must be where it is; their numbers may change
    `versions`  tensors whose numbers must not change, as far as their versions tell
    `around`    modules that `f` was taken out of: of what classes they are, their parts and their hooks
    """
    look = _Look()
    for part in f.modules():
        look.ask(f"{look.name(part)}.__class__ is {look.name(type(part))}")
    for part in around:
        look.ask(f"{look.name(part)}.__class__ is {look.name(type(part))}")
        look.entries(part._modules)
        look.no_hooks(vars(part))
    for label, thing, kind in Walk(f).mutable:
        if label == "self":
            look.at_module(thing)
        else:
            look.at(label, thing, kind)
    for name in ("forward_hooks", "forward_pre_hooks"):
        look.ask(f"not {look.name(getattr(torch_hooks, f'_global_{name}'))}")
    for tensor in in_place:
        look.ask(f"{look.name(tensor.data_ptr)}() == {tensor.data_ptr()}")
    for tensor in versions:
        look.ask(f"{look.name(tensor)}._version == {tensor._version}")
    if look.long:
        look.ask(f"{look.name(fingerprint)}({look.name(f)}) == {look.name(fingerprint(f))}")
    return look.made(), look.long


class _Look:
    """Questions, and the things that they are about."""

    def __init__(self) -> None:
        self.things: dict[str, Any] = {}
        self.names: dict[int, str] = {}
        self.questions: dict[str, None] = {}
        self.long: list[str] = []  # what has too many parts for that
        self.count = itertools.count()

    def name(self, thing: Any) -> str:
        if id(thing) not in self.names:
            self.names[id(thing)] = f"a{next(self.count)}"
            self.things[self.names[id(thing)]] = thing  # held, so that its id stays its own
        return self.names[id(thing)]

    def ask(self, question: str) -> None:
        self.questions[question] = None

    def entries(self, mapping: Any, keys: Iterable[Any] | None = None) -> None:
        """Each entry is the same object, and there is no other."""
        where = self.name(mapping)
        self.ask(f"len({where}) == {len(mapping)}" if mapping else f"not {where}")
        for key in list(mapping) if keys is None else keys:
            place = repr(key) if type(key) is str else self.name(key)
            self.ask(f"{where}[{place}] is {self.name(mapping[key])}")

    def at_module(self, held: dict[str, Any]) -> None:
        """What a module holds: its parameters, buffers or parts; or its own attributes, hooks among them."""
        if "_forward_hooks" not in held:
            self.entries(held)
            return
        self.entries(held, [key for key in held if key not in OF_TORCH])
        self.no_hooks(held)

    def no_hooks(self, held: dict[str, Any]) -> None:
        for hooks in ("_forward_hooks", "_forward_pre_hooks"):
            self.ask(f"not {self.name(held[hooks])}")

    def at(self, label: str, thing: Any, kind: Any) -> None:
        """What is not a module: see `undoing` for the kinds."""
        if kind is CELL:
            self.ask(f"{self.name(thing)}.cell_contents is {self.name(thing.cell_contents)}")
        elif kind is GLOBALS:
            outside, names = thing
            for name in sorted(names & outside.keys()):
                if not (isinstance(outside[name], types.ModuleType) and is_foreign(outside[name].__name__)):
                    self.ask(f"{self.name(outside)}[{name!r}] is {self.name(outside[name])}")
        elif kind is SET_ON and isinstance(thing, type):
            own: Any = vars(thing)
            names = [k for k, v in own.items() if k[:2] != "__" or isinstance(v, types.FunctionType)]
            for name in names:
                self.ask(f"{self.name(own)}[{name!r}] is {self.name(own[name])}")
        elif kind in (ARRAY, SET) or (kind in (MAPPING, SEQUENCE, SET_ON) and len(kind.read(thing)) > _MOST):
            self.long.append(label)
        elif kind is MAPPING:
            self.entries(thing)
        elif kind is SEQUENCE:
            self.ask(f"len({self.name(thing)}) == {len(thing)}")
            for i, value in enumerate(thing):
                self.ask(f"{self.name(thing)}[{i}] is {self.name(value)}")
        elif kind is SET_ON:
            for name, value in kind.read(thing).items():
                self.ask(f"{self.name(thing)}.{name} is {self.name(value)}")

    def made(self) -> Callable[[], bool]:
        """All questions as one function: written out, each takes a fiftieth of a microsecond."""
        given = ", ".join(self.things)
        lines = [f"def make({given}):", " def same():", "  try:", f"   return {' and '.join(self.questions)}"]
        lines += [
            "  except (LookupError, AttributeError, ValueError, RuntimeError):",
            "   return False",
            " return same",
        ]
        scope: dict[str, Any] = {}
        exec("\n".join(lines), scope)
        return scope["make"](**self.things)
