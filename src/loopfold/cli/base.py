"""What all commands share: the app that they belong to, its errors, and how a run is named."""

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
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
RunArgument = Annotated[Path, typer.Argument(help="A run folder, as `loopfold train` makes it.", show_default=False)]
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


def main() -> None:
    """What the command `loopfold` runs."""
    before = signal.signal(signal.SIGINT, _stop)  # until the training loop takes over, which saves first
    try:
        with _errors(), _warnings():
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


def _exit_code(error: Exception) -> int | None:
    from loopfold.processes import ProcessLost
    from loopfold.training.loop import Diverged, Stopped

    if isinstance(error, Stopped):
        return 128 + error.signal
    if isinstance(error, Diverged | ProcessLost):
        return 1
    return 2 if isinstance(error, Mendable | ImportError) else None


def several() -> bool:
    """Whether other processes run the same command, under torchrun."""
    return int(os.environ.get("WORLD_SIZE", 1)) > 1
