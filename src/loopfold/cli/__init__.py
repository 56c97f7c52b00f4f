"""The commands. Flags become objects here, once; what takes long to import is imported where it is used."""

# isort: off
# In the order in which `loopfold --help` shows the commands.
from loopfold.cli.base import app, main
from loopfold.cli.training import train
from loopfold.cli.models import compare, evaluate, generate
from loopfold.cli.drawing import draw
from loopfold.cli.pictures import gradients, report
from loopfold.cli.play import play
from loopfold.cli.runs import export, list_runs, pack

__all__ = [
    "app",
    "compare",
    "draw",
    "evaluate",
    "export",
    "generate",
    "gradients",
    "list_runs",
    "main",
    "pack",
    "play",
    "report",
    "train",
]
