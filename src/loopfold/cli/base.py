"""What all commands share: the app that they belong to, its errors, and how a run is named."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer

from loopfold.errors import Argument, Mendable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Recurrent networks: train one on text, measure it beside honest baselines, let it write.",
)
RunArgument = Annotated[
    Path,
    typer.Argument(help="A run: the folder that `loopfold train` makes, or a packed file.", show_default=False),
]
TextOption = Annotated[
    list[str] | None,
    typer.Option("--text", metavar="PLACE", help="Where the run's own text is now, if it moved; once for each file."),
]
TrustOption = Annotated[
    bool, typer.Option("--trust", help="Run the code of the run's own cell.py; asked once for each.")
]


def flag(name: str, value: object = None) -> str:
    """An argument of a function as it is typed here.

    >>> flag("hidden_size", 9), flag("tied", False), flag("trust", True), flag("part")
    ('--hidden-size 9', '--no-tied', '--trust', '--on')
    """
    word = {"part": "on"}.get(name, name).replace("_", "-")
    if value is False:
        return f"--no-{word}"
    return f"--{word}" if value is None or value is True else f"--{word} {value}"


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


def main() -> None:
    """What the command `loopfold` runs."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal may not be able to write every letter
            stream.reconfigure(errors="backslashreplace")
    before = signal.signal(signal.SIGINT, _stop)  # until the training loop takes over, which saves first
    try:
        with _errors(), _while_read():
            app()
    finally:
        signal.signal(signal.SIGINT, before)


def _stop(number: int, frame: object) -> None:
    """At once: an exception in the middle of an import would be taken for another."""
    os.write(2, b"\nloopfold: stopped.\n")
    os._exit(128 + number)


@app.callback(invoke_without_command=True)
def _options(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        from loopfold import __version__

        typer.echo(__version__)
        raise typer.Exit


@contextmanager
def _while_read() -> Iterator[None]:
    """Whoever reads what is printed may have had enough, as `head` does: then it ends, without a word."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()  # now, and not when Python ends, which would complain
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def _errors() -> Iterator[None]:
    """Whatever a user can mend is one sentence and exit code 2, not a traceback."""
    try:
        yield
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        parts = error.args if isinstance(error, Mendable) else [error]
        said = "".join(flag(part.name, part.value) if isinstance(part, Argument) else str(part) for part in parts)
        line = " ".join(said.splitlines())
        line = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in line)  # names may be anyone's
        typer.echo(f"loopfold: {line}", err=True)
        sys.stdout.flush()
        os._exit(code) if _several() else sys.exit(code)  # a lost process cannot be waited for


def _exit_code(error: Exception) -> int | None:
    from loopfold.processes import ProcessLost
    from loopfold.training.loop import Diverged, Stopped

    if isinstance(error, Stopped):
        return 128 + error.signal
    if isinstance(error, Diverged | ProcessLost):
        return 1
    return 2 if isinstance(error, Mendable | ImportError) else None


def _several() -> bool:
    return int(os.environ.get("WORLD_SIZE", 1)) > 1
