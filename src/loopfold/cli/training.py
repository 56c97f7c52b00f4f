"""The command that makes a run: train."""

import os
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from loopfold.cli.base import TrustOption, app


@app.command(
    epilog="**Example:** `loopfold train shakespeare.txt --preset standard --out runs/bard`, then "
    "`loopfold generate runs/bard --prompt 'ROMEO:'`. Under `torchrun --nproc-per-node 2 -m loopfold train …` the "
    "streams are shared by two processes."
)
def train(
    text: Annotated[
        list[str] | None,
        typer.Argument(help="Files or folders of UTF-8 text, - for standard input; python-docs by default."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder to make; runs/NAME-N by default.")] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Go on with a run that was stopped or killed.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="quick (the default: a minute or two), standard (ten minutes) or words; other flags change it."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Shares of train/valid/test, such as 90/5/5.")] = None,
    valid: Annotated[str | None, typer.Option(help="A valid text of its own; then TEXT is all for training.")] = None,
    test: Annotated[str | None, typer.Option(help="A test text of its own.")] = None,
    unit: Annotated[str | None, typer.Option(help="characters, bytes, words or subwords (BPE).")] = None,
    vocabulary_size: Annotated[int | None, typer.Option(help="The most words, or the number of subwords.")] = None,
    model: Annotated[str | None, typer.Option(help="recurrent, or a baseline: window, convolution.")] = None,
    cell: Annotated[
        str | None, typer.Option(help="elman, lstm, gru, layernorm-lstm, or your own: path/to/file.py:Class.")
    ] = None,
    hidden_size: Annotated[int | None, typer.Option(help="Units in a layer.")] = None,
    layers: Annotated[int | None, typer.Option(help="Layers on top of each other.")] = None,
    embedding_size: Annotated[int | None, typer.Option(help="The hidden size by default.")] = None,
    one_hot: Annotated[bool | None, typer.Option("--one-hot", help="One-hot vectors, no embedding.")] = None,
    tied: Annotated[bool | None, typer.Option(help="One table for embedding and readout.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Between layers and before the readout.")] = None,
    variational: Annotated[bool | None, typer.Option(help="Dropout with one mask for a whole window.")] = None,
    span: Annotated[int | None, typer.Option(help="How many tokens a window or a convolution sees.")] = None,
    streams: Annotated[int | None, typer.Option(help="Parts of the text read side by side: the batch size.")] = None,
    window: Annotated[int | None, typer.Option(help="Steps that gradients go back; the state goes further.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Times through the text.")] = None,
    optimiser: Annotated[str | None, typer.Option(help="adamw or sgd.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At its highest.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, linear or cosine, after the warm-up.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps in which the rate rises.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="How weights shrink by themselves.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of sgd.")] = None,
    clip: Annotated[float | None, typer.Option(help="The largest norm of the gradient; 0: not clipped.")] = None,
    patience: Annotated[int | None, typer.Option(help="Stop after so many evaluations without a better one.")] = None,
    evaluate_every: Annotated[
        int | None, typer.Option(help="Steps from one evaluation to the next; an epoch by default.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of the first weights and of dropout.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    save_every: Annotated[float, typer.Option(help="Seconds from one checkpoint to the next.")] = 30.0,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write events for TensorBoard too.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress display.")] = False,
    trust: TrustOption = False,
) -> None:
    """Train a language model on text, into a run folder. Stop it when you like: --resume goes on, bit for bit."""
    flags = {name: value for name, value in locals().items() if value is not None}
    from loopfold.training import loop, options, watching

    names = {field.name for field in fields(options.Options)}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if name in names}
    if split is not None:
        changes["split"] = _shares(split)
    if text:
        changes["sources"] = tuple(text)
    rank = int(os.environ.get("RANK", 0))
    watchers: list[watching.Watcher] = [] if quiet or rank else [watching.Terminal()]
    if tensorboard and not rank:
        watchers.append(watching.TensorBoard())
    watcher = watching.Several(watchers)
    if resume is not None:
        if given := [name for name in flags if name in {*names, "out", "preset"} or (name == "text" and text)]:
            other = ", ".join(name.upper() if name == "text" else f"--{name.replace('_', '-')}" for name in given)
            raise options.OptionError(f"--resume goes on with the options that the run has; leave out {other}.")
        run = loop.resume(resume, watcher=watcher, save_every=save_every, trust=trust)
    elif trust:
        raise options.OptionError(
            "--trust goes with --resume: a cell of your own, given with --cell, is yours already."
        )
    else:
        chosen = options.preset(preset or "quick", **changes)
        run = loop.train(chosen, out, watcher=watcher, save_every=save_every)
    if not rank:
        following = "; ".join(f"loopfold {command} {run.path}" for command in ("compare", "generate", "report"))
        typer.echo(f"The run is in {run.path}. Next: {following}")


def _shares(split: str) -> tuple[float, ...]:
    from loopfold.training.options import OptionError

    try:
        train_, valid, test = map(float, split.replace(",", "/").split("/"))
    except ValueError:
        raise OptionError(
            f"--split takes shares of train/valid/test, such as 90/5/5, or 90/10/0; {split!r} came."
        ) from None
    return train_, valid, test
