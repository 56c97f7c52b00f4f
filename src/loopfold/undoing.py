"""How the contents of what a step may change are read, compared and put back: one entry for each kind of thing."""

import functools
import random
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Kind(NamedTuple):
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
    return {name: getattr(thing, name) for name in slots(kind) if hasattr(thing, name)}


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


SEQUENCE = Kind(list, _refill, lambda contents: [id(value) for value in contents])
SET = Kind(set, _refill_set, lambda contents: {id(value) for value in contents})
MAPPING = Kind(dict, _refill_dict, _by_identity)
SET_ON = Kind(_attributes, _set_again, _by_identity)
CELL = Kind(lambda cell: cell.cell_contents, lambda cell, before: setattr(cell, "cell_contents", before), id)
GLOBALS = Kind(lambda place: _named(*place), lambda place, before: _name_again(place, before), _by_identity)
ARRAY = Kind(lambda array: array.copy(), _put, lambda array: array.tobytes())
RANDOM = Kind(lambda source: source.getstate(), lambda source, before: source.setstate(before), lambda state: state)
GENERATOR = Kind(lambda g: g.get_state(), lambda g, before: g.set_state(before), lambda state: state.tolist())
RANDOM_STATE = Kind(lambda s: s.get_state(legacy=False), lambda s, before: s.set_state(before), _flat)
BITS = Kind(lambda g: g.bit_generator.state, lambda g, before: setattr(g.bit_generator, "state", before), _flat)


def random_source(value: Any) -> Kind | None:
    """How a source of random numbers is read, if `value` is one."""
    if isinstance(value, random.Random):
        return RANDOM
    if isinstance(value, torch.Generator):
        return GENERATOR
    if not type(value).__module__.startswith("numpy."):  # a class of the user's may answer to any name
        return None
    return BITS if hasattr(value, "bit_generator") else RANDOM_STATE if hasattr(value, "get_state") else None


@functools.cache
def is_foreign(module: str | None) -> bool:
    """Whether code of this Python module is taken to stay as it is: torch, Python's own library, and ourselves."""
    package = (module or "").partition(".")[0]
    return package in ("torch", "loopfold", "numpy") or package in sys.stdlib_module_names


@functools.cache
def slots(kind: Any) -> tuple[str, ...]:
    """The names of a class's slots, as its objects have them; none for a foreign class."""
    if is_foreign(kind.__module__):
        return ()
    found = [(base, vars(base).get("__slots__", ())) for base in kind.__mro__]
    every = [(base, n) for base, names in found for n in ((names,) if isinstance(names, str) else names)]
    private = {n: f"_{base.__name__.lstrip('_')}{n}" for base, n in every if n[:2] == "__" and n[-2:] != "__"}
    return tuple(private.get(n, n) for _, n in every if n in private or n[:2] != "__")
