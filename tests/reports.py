"""Shared by the tests of the report: a run on a text that would like to do harm, and the page on it."""

import atexit
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

import loopfold as lf
from loopfold.report.page import write_report

HOSTILE = (
    'He said "yes (or [no])" & left at 9.\n'
    "</script><script>window.hacked = 1</script>\n"
    '<img src=x onerror="window.hacked = 2">\n'
    "<svg onload=window.hacked=3> <!-- <![CDATA[ ]]> --!> ${window.hacked = 4} &lt; é 世 \u2028 \u202e 𝄞\n"
)
NAME = "<img src=x onerror=window.hacked=5>"


def trained(path: Path, text: str = HOSTILE * 12, name: str = NAME, **changes: Any) -> lf.Run:
    """A tiny run in a folder of a hostile name, on a text in a file of a hostile name."""
    source = path / f"{name}.txt"
    source.write_text(text, encoding="utf-8")
    sizes: dict[str, Any] = {"hidden_size": 8, "streams": 3, "window": 16, "epochs": 2.0, "split": (80, 10, 10)}
    rates: dict[str, Any] = {"learning_rate": 0.03, "warmup": 0}
    options = lf.Options(sources=(str(source),), **(sizes | rates | changes))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = lf.train(options, path / f"run {name}")
    torch.set_num_threads(threads)
    return run


@cache
def hostile() -> tuple[lf.Run, Path]:
    """The run and its page, made once for all tests."""
    path = Path(mkdtemp(prefix="loopfold-report-"))
    atexit.register(shutil.rmtree, path)
    run = trained(path)
    return run, write_report(run, path / "page.html")
