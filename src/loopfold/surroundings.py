"""What a step reads besides its arguments and its tensors: all that Python holds around it.

A trace fixes what that was at one moment. `fingerprint` tells, before every run, whether it is still so; `unchanged`
tells whether a trace has altered any of it, and undoes that. Neither can see everything (the clock, a file, a name put
together at run time), so compiled runs also check themselves: `engines/selfcheck.py`.
"""

import array
import ctypes
import functools
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from loopfold.undoing import (
    ARRAY,
    CELL,
    GENERATOR,
    GLOBALS,
    MAPPING,
    RANDOM,
    RANDOM_STATE,
    SEQUENCE,
    SET,
    SET_ON,
    Kind,
    is_foreign,
    random_source,
    slots,
)


def fingerprint(f: nn.Module) -> tuple[Any, ...]:
    """What a trace of `f` has fixed, as something that can be compared with what it is at a later call.

    All that its modules hold besides tensors, the sizes of those and which are shared; what their methods, and the
    functions that these call, read from the Python modules around them.
    """
    return tuple(Walk(f).found)


class Habits(NamedTuple):
    """What the code of a step does that a trace must know before it starts."""

    names: set[str]  # that it uses, as far as it is the user's own
    iterators: list[str]  # where it holds some, which a trace would use up
    remembers: bool  # whether it has caches that keep what they are given the first time


def habits(f: Callable[..., Any]) -> Habits:
    """Look at a step before it is traced."""
    walk = Walk(f)
    return Habits(walk.names, walk.iterators, walk.remembers)


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
    held = [(label, thing, kind, kind.read(thing)) for label, thing, kind in Walk(f).mutable]
    try:
        with buffers_kept(f):
            yield changed
    finally:
        for label, thing, kind, before in held:
            now, then = kind.key(kind.read(thing)), kind.key(before)
            if now != then:
                kind.write(thing, before)
                keys = {k for k, _ in now ^ then} if label == "self" else ()
                changed += sorted(f"self.{k}" for k in keys) or [label]


@contextmanager
def buffers_kept(f: Callable[..., Any]) -> Iterator[None]:
    """While open, `f` may be called. Afterwards its buffers hold the numbers that they held before."""
    own = f.buffers() if isinstance(f, nn.Module) else ()
    computes = not torch._C._len_torch_dispatch_stack()  # unlike under torch.export
    buffers = [b for b in own if computes and _has_bytes(b)]
    with torch.no_grad():
        before = [b.clone() for b in buffers]
    try:
        yield
    finally:
        for b, numbers in zip(buffers, before, strict=True):
            if not _same_bytes(b, numbers):  # statistics of BatchNorm change without another version, and so back
                if b.is_inference():  # it has no version
                    with torch.inference_mode():
                        b.copy_(numbers)
                else:
                    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(b):
                        b.copy_(numbers)


def _has_bytes(t: Tensor) -> bool:
    """Whether its numbers lie in memory as they are: a sparse, quantized or conjugated tensor is another thing."""
    plain = type(t) is Tensor and t.layout == torch.strided and not t.is_meta
    return plain and not (t.is_quantized or t.is_conj() or t.is_neg())


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


class _Same:
    """Stands for an object in a fingerprint: equal to itself alone. An id would not do: Python gives it out again."""

    __slots__ = ("get", "key")

    def __init__(self, value: Any) -> None:
        self.key = id(value)
        try:
            self.get: Callable[[], Any] = weakref.ref(value)
        except TypeError:  # small things, such as fractions and slices
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.get() is other.get() is not None

    def __hash__(self) -> int:
        return self.key


# ------------------------------------------------------------------ the walk over everything


_PLAIN = {int, bool, str, bytes, complex, types.NoneType, torch.dtype, torch.device, torch.Size, range, types.CodeType}
INDICES = {torch.int64, torch.int32}  # dtypes of buffers whose numbers a trace may fix
OF_TORCH = vars(nn.Module()).keys() - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_SEEDS = {
    "manual_seed",
    "seed",
    "set_rng_state",
}  # what merely draws torch's random numbers is seen by the trace itself
_MOST = 2_000  # objects: what lies beyond is known by its identity alone
_LARGE = 1 << 16  # bytes: of a larger array a sample is compared
_LONG, _SAMPLE = 4096, 1024  # elements: of a longer list a sample is compared
_DEEP = 150  # what lies deeper, as in a linked list, is known by its identity alone
_NEAR = {*_PLAIN, float, list, tuple, dict, types.FunctionType, types.MethodType, functools.partial}
_AGAIN = object()


class Walk:
    """`found`, one flat list, says the same only if everything is the same; `mutable` is what could be altered."""

    def __init__(self, f: Any) -> None:
        self.found: list[Any] = [torch.get_default_dtype()]
        self.mutable: list[tuple[str, Any, Kind]] = []  # label, thing, how it is read
        self.names: set[str] = set()
        self.iterators: list[str] = []
        self.remembers = False
        self.label = ""
        self._classes: set[type] = set()
        self._attributes: set[tuple[int, str]] = set()  # of Python modules
        self._looked_at = self._depth = 0
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
        for part in parts:
            self._class(type(part))

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
                    lazy = nn.parameter.is_lazy(tensor)
                    found.append(None if lazy else (tensor.shape, tensor.dtype, tensor.layout))
                    if not lazy and tensor.dim() and tensor.dtype in INDICES:
                        found += (_Same(tensor), None if tensor.is_inference() else tensor._version)
        for key, value in list(vars(part).items()):  # other threads may be setting some
            if key not in OF_TORCH:
                self.label = f"self.{key}"
                found.append(key)
                self._value(value)
        for held in (vars(part), part._parameters, part._buffers, part._modules):
            self.mutable.append(("self", held, MAPPING))
        found.append(any(getattr(part, name) for name in _HOOKS))

    def _value(self, value: Any) -> None:
        kind = type(value)
        self.found.append(id(kind))  # not the class itself: what is kept of a module must not keep it alive
        if kind in _PLAIN:
            self.found.append(value)
        elif kind is float:
            self.found.append(value.hex())  # 0.0 is not -0.0, and nan is itself
        elif self._meet(value):
            self._looked_at += 1
            self._depth += 1
            if self._looked_at > _MOST or self._depth > _DEEP:
                self.found.append(_Same(value))
            else:
                (_LOOK.get(kind) or _look_at)(self, value)
            self._depth -= 1

    def _values(self, values: Any) -> None:
        self.found.append(len(values))
        if len(values) > _LONG:
            values = [values[i] for i in (*range(0, len(values), len(values) // _SAMPLE), -1)]
        for value in values:
            self._value(value)

    def _container(self, values: Any) -> None:
        self.mutable.append((self.label, values, SEQUENCE))
        self._values(values)

    def _set(self, values: Any) -> None:
        if isinstance(values, set):
            self.mutable.append((self.label, values, SET))
        plain = frozenset(v for v in values if type(v) in _PLAIN or type(v) is float)
        self.found += (plain, frozenset(_Same(v) for v in values if v not in plain))

    def _dict(self, values: Any) -> None:
        if isinstance(values, dict):
            self.mutable.append((self.label, values, MAPPING))
        self.found.append(len(values))
        for key, value in list(values.items()):
            self._value(key)
            self._value(value)

    def _function(self, function: Any) -> None:
        self.found.append(function.__code__)
        foreign = is_foreign(function.__module__)
        if vars(function):
            self.remembers |= not foreign
            self._dict(vars(function))
        if foreign and function.__module__.partition(".")[0] in ("torch", "loopfold", "numpy"):
            return
        mutable = len(self.mutable)
        self._values(function.__defaults__ or ())
        self._value(function.__kwdefaults__)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self.label = name
            self._value(cell)
        if foreign:
            del self.mutable[mutable:]  # what Python's own library remembers is no effect of the step
            return
        names, outside = _names(function.__code__), function.__globals__
        self.names |= names
        if "is_grad_enabled" in names:
            self.found.append(torch.is_grad_enabled())
        self.mutable.append((f"a global of {function.__name__}", (outside, names), GLOBALS))
        for name in sorted(names):
            if name in outside or name in sys.modules:  # the latter where it is imported inside the function
                self.label = name
                self._global(outside[name] if name in outside else sys.modules[name], names)

    def _global(self, value: Any, names: frozenset[str]) -> None:
        """What a function reads by a global name; of a module, the attributes that the function names too."""
        if not isinstance(value, types.ModuleType):
            self._value(value)
        elif value is random:
            self.mutable.append(("the random numbers of random", random, RANDOM))
        elif value.__name__ in ("numpy", "numpy.random") and "random" in (*names, self.label):
            self.mutable.append(("the random numbers of numpy", sys.modules["numpy"].random, RANDOM_STATE))
        elif value is torch and not names.isdisjoint(_SEEDS):
            self.mutable.append(("the random numbers of torch", torch.default_generator, GENERATOR))
        elif not is_foreign(value.__name__):
            for name in sorted(names & vars(value).keys()):
                if (id(value), name) not in self._attributes:
                    self._attributes.add((id(value), name))
                    self.label = f"{value.__name__}.{name}"
                    self.found.append(name)
                    self._global(vars(value)[name], names)

    def _python_module(self, module: Any) -> None:
        """One that is held as a value, so that nothing says which of its attributes are read: all that are data."""
        self.found.append(module.__name__)
        if not is_foreign(module.__name__):
            for name, value in list(vars(module).items()):
                if name[:2] != "__" and not isinstance(value, types.ModuleType | type) and not callable(value):
                    self.found.append(name)
                    self._value(value)

    def _cell(self, cell: Any) -> None:
        try:
            self._value(cell.cell_contents)
            self.mutable.append((self.label, cell, CELL))
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
            if is_foreign(base.__module__):
                continue
            self.found.append(id(base))
            if base not in self._classes:
                self._classes.add(base)
                self.mutable.append((base.__name__, base, SET_ON))
                for name, value in vars(base).items():
                    if not name.startswith("__") or isinstance(value, types.FunctionType):
                        self.label = f"{base.__name__}.{name}"
                        self.found.append(name)
                        self._value(value)

    def _tensor(self, tensor: Tensor) -> None:
        self.found.append(_Same(tensor))  # not its own: a step that computes with it is refused

    def _array(self, array: Any) -> None:
        self.found += (array.shape, array.dtype.str)
        if array.dtype.hasobject:
            self._values(array.ravel().tolist())
        elif array.nbytes > _LARGE:
            self.found.append(hash(array.flat[:: max(1, array.size // _SAMPLE)].tobytes()))
        else:
            self.mutable.append((self.label, array, ARRAY))
            self.found.append(hash(array.tobytes()))


def _look_at(walk: Walk, value: Any) -> None:
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
    source = random_source(value)
    if source is not None:
        walk.mutable.append((f"the random numbers of {walk.label}", value, source))
        walk.found.append(str(source.key(source.read(value))))
    if isinstance(value, Iterator):
        walk.iterators.append(walk.label)
    if isinstance(value, float | int | str | bytes | complex):  # of a class of its own
        walk.found.append(repr(value))
    elif isinstance(value, array.array | bytearray | ctypes.Array):
        walk.found.append(hash(bytes(memoryview(value))))
    elif isinstance(value, ContextVar):
        walk._value(value.get(None))
    walk.remembers |= isinstance(value, threading.local | functools._lru_cache_wrapper | weakref.WeakKeyDictionary)
    walk.found.append(_Same(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        kind = type(value).__module__
        if not is_foreign(kind) or kind in ("types", "argparse", "collections"):
            walk._dict(attributes)
        else:  # of a logger, or an optimiser, what is near: the rest holds the whole world
            walk._values([v for v in attributes.values() if type(v) in _NEAR])
    own: Any = type(value)
    for name in slots(own):
        walk._value(getattr(value, name, None))
    if slots(own):
        walk.mutable.append((walk.label, value, SET_ON))
    return walk._class(type(value))


_LOOK: dict[type, Callable[[Walk, Any], None]] = {
    **dict.fromkeys((list, deque), Walk._container),
    tuple: Walk._values,
    types.CellType: Walk._cell,
    **dict.fromkeys((set, frozenset), Walk._set),
    **dict.fromkeys((dict, types.MappingProxyType), Walk._dict),
    **dict.fromkeys((Tensor, nn.Parameter), Walk._tensor),
    types.FunctionType: Walk._function,
    types.MethodType: Walk._method,
    types.BuiltinFunctionType: Walk._builtin,
    types.ModuleType: Walk._python_module,
    functools.partial: lambda walk, p: walk._values((p.func, p.args, p.keywords)),
    property: lambda walk, p: walk._value(p.fget),
    functools.cached_property: lambda walk, p: walk._value(p.func),
    **dict.fromkeys((staticmethod, classmethod), lambda walk, method: walk._value(method.__func__)),
}


@functools.cache
def _names(code: types.CodeType) -> frozenset[str]:
    """The global names and attributes in a function, and in the functions written inside it."""
    inner = [_names(c) for c in code.co_consts if isinstance(c, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def global_hooks() -> bool:
    """Whether hooks are set that every module would call."""
    names = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")
    return any(getattr(torch_hooks, f"_global_{name}", None) for name in names)


def in_a_transform() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is under way."""
    return torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0
