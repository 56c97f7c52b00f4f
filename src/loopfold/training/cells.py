"""Cells by name: those of the library, and the user's own as `path/to/file.py:Class`."""

import importlib.util
import inspect
import linecache
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from loopfold.errors import Argument, Mendable, OptionError, choose
from loopfold.files import source_of
from loopfold.states import name_of
from loopfold.transitions import CELLS, Initialiser, Orthogonal, ScaledIdentity, Uniform


class CellError(OptionError):
    """An error in the code of a user's own cell; the message begins with its file and line."""


_files = set[str]()  # of users' own cells, as they were run


@contextmanager
def blaming(failed: Callable[[], str]) -> Iterator[None]:
    """An error that comes from the file of a user's own cell is told with its file and line first, then what failed."""
    try:
        yield
    except Mendable:
        raise
    except Exception as error:
        place = place_in_cell(error)
        if place is None:
            raise
        raise CellError(f"{place} ({failed()})") from error


def place_in_cell(error: BaseException | None) -> str | None:
    """An error of a user's own cell, and where, as in "cell.py, line 12, in forward: KeyError: 'h'"; else None."""
    while error is not None:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, SyntaxError) and error.filename in _files:
            return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            code = frame.f_code
            if code.co_filename in _files:
                return f"{code.co_filename}, line {line}, in {code.co_name}: {said}"
        error = error.__cause__ or error.__context__  # what came from there may have been wrapped since
    return None


def name_of_cell(kind: type[nn.Module]) -> str:
    """A class as a run folder can name it."""
    for name, own in CELLS.items():
        if kind is own:
            return name
    if kind.__module__ == "__main__":
        raise OptionError(
            f"a run folder keeps the file of {kind.__name__} and runs it again, but that file is the script that is "
            f"running now: put {kind.__name__} in a file of its own and import it."
        )
    path = inspect.getsourcefile(kind) or ""
    if not Path(path).is_file() or "." in kind.__qualname__:
        raise OptionError(
            f"{kind.__name__} is not at the top level of a file, and a run folder keeps its file: put it in one."
        )
    return f"{path}:{kind.__name__}"


STARTS: dict[str, Initialiser] = {"uniform": Uniform(), "orthogonal": Orthogonal(), "identity": ScaledIdentity()}


def make_cell(name: str, input_size: int, hidden_size: int, **starts: Any) -> nn.Module:
    """A cell by its name. One of the user's own is made as `Class(input_size, hidden_size)`.

    `starts` are how it starts, `recurrent_init` and `forget_bias`; those that a class does not take are refused.
    """
    return maker_of(name)(input_size, hidden_size, **starts)


def maker_of(name: str) -> Callable[..., nn.Module]:
    """The same for several cells, `(input_size, hidden_size, **starts)`: the file of the user's own is run once."""
    if ":" not in name:
        if name.endswith(".py"):
            raise OptionError(f"{name} may hold several classes; say which one is the cell: {name}:MyCell.")
        return partial(_stock, name, CELLS[choose("cell", name, tuple(CELLS))])
    path, _, wanted = name.rpartition(":")
    return partial(_own, path, wanted, _load_class(Path(path), wanted))


def _stock(name: str, kind: Any, input_size: int, hidden_size: int, **starts: Any) -> nn.Module:
    _check_starts(kind, name, starts)
    return kind(input_size, hidden_size, **starts)


def _own(path: str, wanted: str, kind: Any, input_size: int, hidden_size: int, **starts: Any) -> nn.Module:
    _check_starts(kind, wanted, starts)
    failed = (
        f"{wanted} of {path} could not be made as {wanted}({input_size}, {hidden_size}), its input size and hidden size"
    )
    try:
        with blaming(lambda: failed):
            cell = kind(input_size, hidden_size, **starts)
    except CellError:
        raise
    except Exception as error:  # not in that file: it takes other arguments, say
        raise OptionError(f"{failed}: {error}") from error
    if not isinstance(cell, nn.Module):
        raise OptionError(f"{wanted} of {path} must be a torch.nn.Module with forward(state, x); got {name_of(cell)}.")
    return cell


def _check_starts(kind: Any, name: str, starts: Mapping[str, Any]) -> None:
    for start in starts:
        if start not in inspect.signature(kind).parameters:
            have = " and ".join(known for known, cell in CELLS.items() if start in inspect.signature(cell).parameters)
            raise OptionError(f"{name} does not take ", Argument(start), f", only {have} do: leave it out.")


def check_cell(name: str) -> None:
    """That the file of a cell of the user's own runs and has the class."""
    if ":" in name:
        path, _, wanted = name.rpartition(":")
        _load_class(Path(path), wanted)


def _load_class(path: Path, name: str) -> Any:
    """The class of that name in a file, which is run for it."""
    try:
        source = source_of(path)
    except (OSError, ValueError):
        raise OptionError(f"there is no file {path}; a cell of your own is given as path/to/file.py:Class.") from None
    spec = importlib.util.spec_from_file_location(f"cell_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise OptionError(f"{path} is not a Python file; a cell of your own is given as path/to/file.py:Class.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look themselves up there
    _files.add(str(path))
    if not path.is_file():  # it is in an archive, where Python would not find the lines that an error shows
        lines = source.decode(errors="replace").splitlines(keepends=True)
        linecache.cache[str(path)] = (len(source), None, lines, str(path))
    try:
        with blaming(lambda: f"{path} does not run"):
            # from the source, not by the loader: that would run compiled code that lies beside it
            exec(compile(source, path, "exec"), vars(module))
    except CellError:
        raise
    except Exception as error:
        raise OptionError(f"{path} does not run: {type(error).__name__}: {error}") from error
    found = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
    if not isinstance(vars(module).get(name), type):
        raise OptionError(f"{path} has no class {name!r}; it has {', '.join(found) or 'no torch.nn.Module at all'}.")
    return vars(module)[name]
