"""What a step reads besides its arguments and its tensors: all that Python holds around it.

A trace fixes what that was at one moment. `fingerprint` tells, before every run, whether it is still so; `unchanged`
tells whether a trace has altered any of it, and undoes that. Neither can see everything (the clock, a file, a name put
together at run time), so compiled runs also check themselves: `engines/selfcheck.py`.
"""

import argparse
import functools
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks


def fingerprint(f: nn.Module) -> tuple[Any, ...]:
    """What a trace of `f` has fixed, as something that can be compared with what it is at a later call.

    All that its modules hold besides tensors, the sizes of those and which are shared; what their methods, and the
    functions that these call, read from the Python modules around them.
    """
    return tuple(_Walk(f).found)


def modes_asked_for(f: Callable[..., Any]) -> set[str]:
    """By which functions of torch's a step asks how it is run."""
    return _Walk(f).modes


def only_numbers_differ(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether two fingerprints are the same but for the values of floats."""
    if len(one) != len(other):
        return False
    different = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return all(one[i - 1] == other[i - 1] == id(float) for i in different)


@contextmanager
def unchanged(f: Callable[..., Any]) -> Iterator[list[str]]:
    """While open, `f` may be called. Afterwards what it has changed is as it was before, and named in the list."""
    changed: list[str] = []
    things = [*_Walk(f).mutable, ("the random numbers of torch", torch.default_generator, _GENERATOR)]
    things.append(("the random numbers of random", random, _RANDOM))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        things.append(("the random numbers of numpy", numpy.random, _RANDOM_STATE))
    held = [(label, thing, kind, kind.read(thing)) for label, thing, kind in things]
    try:
        yield changed
    finally:
        for label, thing, kind, before in held:
            now, then = kind.key(kind.read(thing)), kind.key(before)
            if now != then:
                kind.write(thing, before)
                keys = {k for k, _ in now ^ then} if label == "self" else ()
                changed += sorted(f"self.{k}" for k in keys) or [label]


class _Kind(NamedTuple):
    """How the contents of a kind of thing are read, put back, and compared."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], Any]
    key: Callable[[Any], Any]


def _refill(thing: Any, before: list[Any]) -> None:
    thing.clear()
    thing.extend(before)


def _refill_set(thing: set[Any], before: set[Any]) -> None:
    thing &= before
    thing |= before


def _refill_dict(thing: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Never empty in between: it may be what a module holds, and other threads may be using that."""
    for key in thing.keys() - before.keys():
        del thing[key]
    thing.update(before)


def _set_again(thing: Any, before: dict[str, Any]) -> None:
    for name in [name for name in _attributes(thing) if name not in before]:
        delattr(thing, name)
    for name, value in before.items():
        if getattr(thing, name, before) is not value:
            setattr(thing, name, value)


def _attributes(thing: Any) -> dict[str, Any]:
    """What is set on an object with slots, or on a class."""
    if isinstance(thing, type):
        return {name: value for name, value in vars(thing).items() if not name.startswith("__")}
    kind: Any = type(thing)
    return {name: getattr(thing, name) for name in _slots(kind) if hasattr(thing, name)}


def _named(variables: dict[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: variables[name] for name in names if name in variables}


def _name_again(place: tuple[dict[str, Any], frozenset[str]], before: dict[str, Any]) -> None:
    variables, names = place
    for name in _named(variables, names).keys() - before.keys():
        del variables[name]
    variables.update(before)


def _by_identity(contents: dict[Any, Any]) -> Any:
    return {(key, id(value)) for key, value in contents.items()}


def _flat(state: dict[str, Any]) -> list[Any]:
    """Where numpy's random numbers stand, as something that can be compared."""
    values = state.values()
    return [_flat(v) if isinstance(v, dict) else v.tobytes() if hasattr(v, "tobytes") else v for v in values]


def _put(array: Any, before: Any) -> None:
    array[...] = before


_SEQUENCE = _Kind(list, _refill, lambda contents: [id(value) for value in contents])
_SET = _Kind(set, _refill_set, lambda contents: {id(value) for value in contents})
_MAPPING = _Kind(dict, _refill_dict, _by_identity)
_SET_ON = _Kind(_attributes, _set_again, _by_identity)
_CELL = _Kind(lambda cell: cell.cell_contents, lambda cell, before: setattr(cell, "cell_contents", before), id)
_GLOBALS = _Kind(lambda place: _named(*place), lambda place, before: _name_again(place, before), _by_identity)
_ARRAY = _Kind(lambda array: array.copy(), _put, lambda array: array.tobytes())
_RANDOM = _Kind(lambda source: source.getstate(), lambda source, before: source.setstate(before), lambda state: state)
_GENERATOR = _Kind(lambda g: g.get_state(), lambda g, before: g.set_state(before), lambda state: state.tolist())
_RANDOM_STATE = _Kind(lambda s: s.get_state(legacy=False), lambda s, before: s.set_state(before), _flat)
_BITS = _Kind(lambda g: g.bit_generator.state, lambda g, before: setattr(g.bit_generator, "state", before), _flat)


def _random_source(value: Any) -> _Kind | None:
    """How a source of random numbers is read, if `value` is one."""
    if isinstance(value, random.Random):
        return _RANDOM
    if isinstance(value, torch.Generator):
        return _GENERATOR
    if hasattr(value, "bit_generator"):  # numpy's, new and old
        return _BITS
    return _RANDOM_STATE if hasattr(value, "get_state") and type(value).__module__.startswith("numpy") else None


# ------------------------------------------------------------------ the walk over everything


_PLAIN = {int, bool, str, bytes, complex, types.NoneType, torch.dtype, torch.device, torch.Size, range, types.CodeType}
_OF_TORCH = vars(nn.Module()).keys() - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MODES = {"is_grad_enabled", "is_inference_mode_enabled"}
_MOST = 500  # objects: what lies beyond is known by its identity alone
_LARGE = 1 << 16  # bytes: of a larger array a sample is compared
_AGAIN = object()


class _Walk:
    """`found`, one flat list, says the same only if everything is the same; `mutable` is what could be altered."""

    def __init__(self, f: Any) -> None:
        self.found: list[Any] = [torch.get_default_dtype()]
        self.mutable: list[tuple[str, Any, _Kind]] = []  # label, thing, how it is read
        self.modes: set[str] = set()  # what is asked about the way in which torch runs
        self.label = ""
        self._classes: set[type] = set()
        self._met: dict[int, int] = {}
        self._alive: list[Any] = []  # so that no two things met have had the same id
        if not isinstance(f, nn.Module):
            self._value(f)
            return
        parts = list(f.modules())
        for part in parts:
            self._meet(part)
        for part in parts:
            self._module(part)

    def _meet(self, value: Any) -> bool:
        """Note the first time that something is met; the next times are told by its number."""
        number = self._met.setdefault(id(value), len(self._met))
        if number < len(self._met) - 1 or len(self._alive) > number:
            self.found += (_AGAIN, number)
            return False
        self._alive.append(value)
        return True

    def _module(self, part: nn.Module) -> None:
        found = self.found
        found.append(id(type(part)))
        for key, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None:
                found.append(key)
                if self._meet(tensor):
                    found.append(None if nn.parameter.is_lazy(tensor) else (tensor.shape, tensor.dtype, tensor.layout))
        for key, value in vars(part).items():
            if key not in _OF_TORCH:
                self.label = f"self.{key}"
                found.append(key)
                self._value(value)
        for held in (vars(part), part._parameters, part._buffers, part._modules):
            self.mutable.append(("self", held, _MAPPING))
        found.append(any(getattr(part, name) for name in _HOOKS))
        self._class(type(part))

    def _value(self, value: Any) -> None:
        kind = type(value)
        self.found.append(id(kind))  # not the class itself: what is kept of a module must not keep it alive
        if kind in _PLAIN:
            self.found.append(value)
        elif kind is float:
            self.found.append(value.hex())  # 0.0 is not -0.0, and nan is itself
        elif self._meet(value):
            if len(self._met) > _MOST:
                self.found.append(id(value))
            else:
                (_LOOK.get(kind) or _look_at)(self, value)

    def _values(self, values: Any) -> None:
        self.found.append(len(values))
        for value in values:
            self._value(value)

    def _container(self, values: Any) -> None:
        self.mutable.append((self.label, values, _SEQUENCE))
        self._values(values)

    def _set(self, values: Any) -> None:
        if isinstance(values, set):
            self.mutable.append((self.label, values, _SET))
        plain = frozenset(v for v in values if type(v) in _PLAIN or type(v) is float)
        self.found += (plain, *sorted(id(v) for v in values if v not in plain))

    def _dict(self, values: Any) -> None:
        if isinstance(values, dict):
            self.mutable.append((self.label, values, _MAPPING))
        self.found.append(len(values))
        for key, value in values.items():
            self._value(key)
            self._value(value)

    def _function(self, function: Any) -> None:
        self.found.append(function.__code__)
        if _is_foreign(function.__module__):
            return
        self._values(function.__defaults__ or ())
        self._value(function.__kwdefaults__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.label = name
            self._value(cell)
        names = _names(function.__code__)
        if not names.isdisjoint(_MODES):
            self.modes |= names & _MODES
            self.found.append(torch.is_grad_enabled())
        outside = function.__globals__
        self.mutable.append((f"a global of {function.__name__}", (outside, names), _GLOBALS))
        for name in sorted(names):
            if name in outside:
                self.label = name
                self._global(outside[name], names)

    def _global(self, value: Any, names: frozenset[str]) -> None:
        """What a function reads by a global name; of a module, the attributes that the function names too."""
        if not isinstance(value, types.ModuleType):
            self._value(value)
        elif not _is_foreign(value.__name__) and self._meet(value):
            for name in sorted(names):
                if name in vars(value):
                    self.found.append(name)
                    self._global(vars(value)[name], names)

    def _cell(self, cell: Any) -> None:
        try:
            self._value(cell.cell_contents)
            self.mutable.append((self.label, cell, _CELL))
        except ValueError:  # a name that has no value yet
            self.found.append(None)

    def _method(self, method: Any) -> None:
        self._value(method.__func__)
        self._value(method.__self__)

    def _builtin(self, function: Any) -> None:
        self.found.append(function.__name__)
        if not isinstance(function.__self__, types.ModuleType):
            self._value(function.__self__)

    def _class(self, kind: type) -> None:
        """What the user's own classes hold: constants, and what their methods read."""
        for base in kind.__mro__:
            if _is_foreign(base.__module__):
                continue
            self.found.append(id(base))
            if base not in self._classes:
                self._classes.add(base)
                self.mutable.append((base.__name__, base, _SET_ON))
                for name, value in vars(base).items():
                    if not name.startswith("__") or name in ("__call__", "__getattr__"):
                        self.label = f"{base.__name__}.{name}"
                        self.found.append(name)
                        self._value(value)

    def _tensor(self, tensor: Tensor) -> None:
        self.found.append(id(tensor))  # not its own: whoever computes with it is refused

    def _array(self, array: Any) -> None:
        self.mutable.append((self.label, array, _ARRAY))
        step = max(1, array.nbytes // _LARGE)
        self.found += (array.shape, array.dtype.str)
        if array.dtype.hasobject:
            self._values(array.ravel().tolist())
        else:
            self.found.append(hash(array.ravel()[::step].tobytes()))


def _look_at(walk: _Walk, value: Any) -> None:
    """What has no entry in `_LOOK`: things of the user's own classes, and of libraries."""
    if isinstance(value, Tensor):
        return walk._tensor(value)
    if isinstance(value, nn.Module):  # one that is not registered
        return walk._module(value)
    if isinstance(value, type):
        return walk._class(value)
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
        return walk._array(value)
    for kinds, look in ((dict, walk._dict), ((list, deque), walk._container), (set, walk._set), (tuple, walk._values)):
        if isinstance(value, kinds):
            look(value)
    source = _random_source(value)
    if source is not None:
        walk.mutable.append((f"the random numbers of {walk.label}", value, source))
        walk.found.append(str(source.key(source.read(value))))
    known = _is_foreign(type(value).__module__) and not isinstance(value, types.SimpleNamespace | argparse.Namespace)
    attributes = None if known else getattr(value, "__dict__", None)  # a logger, say, holds the whole world
    kind: Any = type(value)
    slots = _slots(kind)
    if isinstance(attributes, dict):
        walk._dict(attributes)
    for name in slots:
        walk._value(getattr(value, name, None))
    if slots:
        walk.mutable.append((walk.label, value, _SET_ON))
    if attributes is None and not slots and source is None:
        walk.found.append(id(value))
    return walk._class(type(value))


_LOOK: dict[type, Callable[[_Walk, Any], None]] = {
    **dict.fromkeys((list, deque), _Walk._container),
    tuple: _Walk._values,
    types.CellType: _Walk._cell,
    **dict.fromkeys((set, frozenset), _Walk._set),
    **dict.fromkeys((dict, types.MappingProxyType), _Walk._dict),
    **dict.fromkeys((Tensor, nn.Parameter), _Walk._tensor),
    types.FunctionType: _Walk._function,
    types.MethodType: _Walk._method,
    types.BuiltinFunctionType: _Walk._builtin,
    types.ModuleType: lambda walk, module: walk.found.append(module.__name__),
    functools.partial: lambda walk, p: walk._values((p.func, p.args, p.keywords)),
    property: lambda walk, p: walk._value(p.fget),
    functools.cached_property: lambda walk, p: walk._value(p.func),
    **dict.fromkeys((staticmethod, classmethod), lambda walk, method: walk._value(method.__func__)),
}


@functools.cache
def _is_foreign(module: str | None) -> bool:
    """Whether code of this Python module is taken to stay as it is: torch, Python's own library, and ourselves."""
    package = (module or "").partition(".")[0]
    return package in ("torch", "loopfold", "numpy") or package in sys.stdlib_module_names


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The global names and attributes in a function, and in the functions written inside it."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _slots(kind: Any) -> tuple[str, ...]:
    if _is_foreign(kind.__module__):
        return ()
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__]
    return tuple(n for names in found for n in ((names,) if isinstance(names, str) else names) if n[:2] != "__")


def global_hooks() -> bool:
    """Whether hooks are set that every module would call."""
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(torch_hooks, f"_global_{name}", None) for name in names)
