"""What all commands share: the app that they belong to, its errors, and how a run, a device or a part is named."""

import importlib.util
import io
import json
import math
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from loopfold.cli.usage import NOT_FINITE, TOO_LONG, usage
from loopfold.errors import Argument, Mendable, Spelt
from loopfold.training.options import Options

Function = TypeVar("Function", bound=Callable[..., Any])


def _flags_alone(parameters: list[Any]) -> list[Any]:
    """For the help, where a flag is shown as it is typed: `--quiet` and not `--quiet <bool>`."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
    return parameters


class _Command(TyperCommand):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_alone(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Every number is finite, and fits in 64 bits."""
        rest = super().parse_args(ctx, args)
        known: list[Any] = self.params
        for parameter in known:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                raise typer.BadParameter(NOT_FINITE, ctx, parameter)
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise typer.BadParameter(TOO_LONG, ctx, parameter)
        return rest


class _Group(TyperGroup):
    def get_params(self, ctx: Any) -> list[Any]:
        return _flags_alone(super().get_params(ctx))


class _App(typer.Typer):
    def command(self, *names: Any, **options: Any) -> Callable[[Function], Function]:
        return super().command(*names, cls=_Command, **options)


app = _App(
    cls=_Group,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Recurrent networks: train one on text, measure it beside honest baselines, let it write.",
)


# ------------------------------------------------------------------ arguments of several commands


def completing(*names: str) -> Callable[[str], list[str]]:
    """What the shell offers for an option whose value is one of these names."""
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def cells(incomplete: str) -> list[str]:
    """The cells of the library; read, since importing them takes PyTorch, which takes seconds."""
    spec = importlib.util.find_spec("loopfold.transitions")
    source = Path(spec.origin).read_text() if spec and spec.origin else ""
    return completing(*re.findall(r'^ +stock_name = "(.+)"$', source, re.MULTILINE))(incomplete)


RunArgument = Annotated[
    Path,
    typer.Argument(help="A run: the folder that `loopfold train` makes, or a packed file.", show_default=False),
]
TextOption = Annotated[
    list[str] | None,
    typer.Option(
        "--text", metavar="PLACE", help="Where the run's own text is, once for each file; by default where it was."
    ),
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run the code of the run's own cell.py; needed once for each.")
]
devices = completing("cpu", "cuda", "auto")
DeviceOption = Annotated[str, typer.Option(help=Options.about("device"), autocompletion=devices)]
AsTrainedOption = Annotated[
    str | None,
    typer.Option(
        help=f"{Options.about('device')} By default a GPU where the run was trained for one and one is there.",
        autocompletion=devices,
    ),
]
PartOption = Annotated[
    str | None,
    typer.Option(
        help="Which part of the run's text: test, valid or train; by default test, or valid where that is missing.",
        autocompletion=completing("test", "valid", "train"),
    ),
]


def flag(name: str, value: object = None) -> str:
    """An argument of a function as it is typed here.

    >>> flag("hidden_size", 9), flag("hidden_size", (9, 4)), flag("tied", False), flag("trust", True), flag("part")
    ('--hidden-size 9', '--hidden-size 9-4', '--no-tied', '--trust', '--on')
    """
    word = {"part": "on", "path": "to"}.get(name, name).replace("_", "-")
    if value is False:
        return f"--no-{word}"
    value = "-".join(map(str, value)) if isinstance(value, tuple) else value
    return f"--{word}" if value is None or value is True else f"--{word} {value}"


def spelt(parts: Iterable[object]) -> str:
    """A message of the library, with its arguments as they are typed here."""
    words = (part.typed if isinstance(part, Spelt) else (part,) for part in parts)
    return "".join(flag(w.name, w.value) if isinstance(w, Argument) else str(w) for group in words for w in group)


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print, in what the terminal says it can write: left to itself, typer would write UTF-8 to one that has ASCII."""
    typer.echo(text, file=sys.stderr if err else sys.stdout, nl=nl)


def echo_json(data: Any) -> None:
    """Print JSON that any reader takes: numbers that are not finite are null, and all is ASCII."""
    from loopfold.training.contents import finite

    echo(json.dumps(finite(data), indent=1, allow_nan=False))


_PLAIN = str.maketrans({"ⁿ": "^n", "—": "-", "─": "-", "×": "x", "‖": "|", "∂": "d", "…": "..."})


def writable(text: str) -> str:
    """Words of ours as the terminal can write them. What others wrote is not respelt, but escaped where need be."""
    try:
        text.encode((sys.stdout and sys.stdout.encoding) or "utf-8")
    except UnicodeEncodeError:
        return text.translate(_PLAIN)
    return text


# ------------------------------------------------------------------ the command, and what goes wrong with it


def main() -> None:
    """What the command `loopfold` runs."""
    _set_up_libraries()
    before = signal.signal(signal.SIGINT, _stop)  # until the training loop takes over, which saves first
    try:
        with _errors(), _warnings(), _output(), _telling():
            code = app(standalone_mode=False, prog_name="loopfold")
            if code == 128 + signal.SIGINT:  # a second one, while the first was being obeyed
                echo("loopfold: stopped at once; a run goes on from what it saved last.", err=True)
        sys.exit(code or 0)
    finally:
        signal.signal(signal.SIGINT, before)


def _set_up_libraries() -> None:
    """What libraries of torch read when they are loaded, unless the user has set it.

    A thread that waits for others gives up its core after 4,000 looks, not 300,000: where other programs run too, those
    it waits for may need that very core. Large tensors lie in large pages, which take less time to map at every step.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "4000")
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def _stop(number: int, frame: object) -> None:
    """At once: an exception in the middle of an import would be taken for another."""
    os.write(2, b"\nloopfold: stopped.\n")
    os._exit(128 + number)


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    if version:
        from loopfold import __version__

        typer.echo(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@contextmanager
def _output() -> Iterator[None]:
    """What a terminal cannot write, it writes as \\xff: names of files may be any bytes, and texts any characters."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    yield
    if sys.stdout is not None:
        sys.stdout.flush()  # now, when a full device can still be told of


@contextmanager
def _telling() -> Iterator[None]:
    """How far something long is: on a terminal a line that is gone in the end, elsewhere one every ten seconds."""
    from loopfold.telling import telling

    if {"--quiet", "-q"} & {*sys.argv} or rank() or sys.stderr is None:
        yield
        return
    live = sys.stderr.isatty()
    begun = shown = time.monotonic()
    first = last = "", 0, begun  # what was told, and when

    def show(doing: str, done: int, of: int, unit: str) -> None:
        nonlocal shown, first, last
        if not live and unit != "bytes":  # a log is told of long texts, which may take hours
            return
        ended, now = live and done >= of, time.monotonic()
        if last[0] != doing or last[1] >= done:  # it begins, perhaps again
            first = doing, done, now
        last = doing, done, now
        if now - shown < (0.2 if live else 10) and not ended:
            return
        shown = now
        size, unit = (1e6, "MB") if unit == "bytes" else (1, unit)
        line = f"{printable(doing)}: {done / size:,.0f} of {of / size:,.0f} {unit}"
        if now - first[2] >= 1 and done > first[1]:
            line += f", {timedelta(seconds=round((of - done) * (now - first[2]) / (done - first[1])))} left"
        with suppress(OSError):
            sys.stderr.write(f"\r\x1b[K{'' if ended else line}" if live else line + "\n")
            sys.stderr.flush()

    try:
        with telling(show):
            yield
    finally:
        if live and shown > begun:
            show("", 0, 0, "")  # what is said next has a line of its own


@contextmanager
def _errors() -> Iterator[None]:
    """Whatever a user can mend is one sentence and exit code 2, not a traceback."""
    try:
        yield
    except BrokenPipeError:  # whoever read it, as head does, has read enough
        _flush()
        sys.exit(1)
    except Exception as error:
        code, said = _exit_code(error), _sentence(error)
        if code is None:
            from loopfold.training.cells import place_in_cell

            place = place_in_cell(error)
            if place is None:
                raise
            code, said = 2, place
        line = printable(" ".join(said.splitlines()))
        with suppress(OSError):
            typer.echo(f"loopfold: {line}", err=True)
        _flush()
        os._exit(code) if several() else sys.exit(code)  # a lost process cannot be waited for


@contextmanager
def _warnings() -> Iterator[None]:
    """That a cell cannot be compiled is said once, in one line: not for each layer, nor with a line of our code."""
    told = set[str]()

    def show(message: Warning | str, category: type[Warning], *rest: Any) -> None:
        if category.__name__ != "EngineWarning":
            return plain(message, category, *rest)
        said = str(message).partition(" Type engine=")[0]
        _, slow, why = said.partition(" runs as a Python loop: ")
        if (slow or said) not in told:
            print(f"note: {f'the cell runs as a Python loop, which is slow: {why}' if slow else said}", file=sys.stderr)
        return told.add(slow or said)

    with warnings.catch_warnings():
        plain, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        yield


_SMALLER = {  # what of a command takes much memory
    "train": "--hidden-size, --streams or --window",
    "evaluate": "--streams or --window",
    "generate": "--samples or --beam",
    "gradients": "--steps",
    "draw": "--steps",
}


def _sentence(error: Exception) -> str:
    if isinstance(error, Mendable):
        return spelt(error.args)
    if isinstance(error, typer.TyperException):
        return usage(error, sys.argv[1:])
    if isinstance(error, UnicodeEncodeError):
        word = re.compile(r"[^\s\"'/]*$").search(error.object[: error.start])
        name = (word[0] if word else "") + re.split(r"[\s\"'/]", error.object[error.start :], maxsplit=1)[0]
        return f"{name!r} is not UTF-8: type it in UTF-8, or give the file another name."
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        if error.filename is None:
            return f"what the command prints cannot be written: {reason}."
        return f"{os.fsdecode(error.filename)} cannot be used: {reason}."
    if _is_out_of_memory(error):
        smaller = _SMALLER.get(" ".join(sys.argv[1:2]))
        return f"there is not enough memory for this{f': choose a smaller {smaller}' if smaller else ''}."
    return str(error)


def _exit_code(error: Exception) -> int | None:
    if isinstance(error, typer.TyperException):  # at once: what follows imports PyTorch
        return 2 if error.exit_code == 2 else None  # what is typed wrong; others are faults of ours
    from loopfold.processes import ProcessLost
    from loopfold.training.loop import Diverged, Stopped

    if isinstance(error, Stopped):
        return 128 + error.signal
    if isinstance(error, Diverged | ProcessLost):
        return 1
    if isinstance(error, UnicodeEncodeError):
        return 2 if "surrogates" in error.reason else None  # what came as an argument and is no text
    return 2 if isinstance(error, Mendable | ImportError | OSError) or _is_out_of_memory(error) else None


def _is_out_of_memory(error: Exception) -> bool:
    """By its words where PyTorch has no class for it."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError)
        and re.search("out of memory|not enough memory|allocate memory|size calculation overflowed", str(error))
        is not None
    )


def printable(text: str) -> str:
    """A text that may be anyone's, without what a terminal would obey; a byte that is no UTF-8 stands as itself."""
    codes = (ord(c) - 0xDC00 if 0xDC80 <= ord(c) <= 0xDCFF else ord(c) for c in text)
    return "".join(c if c.isprintable() else f"\\x{code:02x}" for c, code in zip(text, codes, strict=True))


def _flush() -> None:
    """What was printed before; where that cannot be written, it is given up, or Python would try again and complain."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def several() -> bool:
    """Whether other processes run the same command, under torchrun."""
    return _set("WORLD_SIZE") > 1


def rank() -> int:
    """Which of them this is; 0 where it is the only one, whatever RANK may mean to other programs."""
    return _set("RANK") if several() else 0


def _set(name: str) -> int:
    value = os.environ.get(name, "")
    return int(value) if value.isdecimal() else 0
