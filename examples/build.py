"""Run the examples and write docs/claims.md from what they say, print and draw.

    python examples/build.py             # all of them
    python examples/build.py --only 3    # one of them; the entries of the others stay as they are

Each script runs as a process of its own. The page is written when all have finished, or not at all.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "claims.md"
HEAD = """\
# The claims, as experiments

What textbooks and lecture notes say of recurrent networks, each claim as a short script that runs: the claim, what came
out, and a picture of it. `make examples` runs them all and writes this page. Before each verdict stands what must come
out for the claim to hold; verdicts and figures are those of the run. "Book" refers to *Deep Learning* by Goodfellow,
Bengio and Courville (2016), chapter 10.

## The verdicts
"""
VERDICT = re.compile(r"^claim +(.+)\nholds if +.+\nverdict +(.+)\nfigures +(.+)$", re.MULTILINE)


def entry(script: Path) -> str:
    """Run a script; its section of the page."""
    claim = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8")))
    if not claim:
        sys.exit(f"{script} has no docstring, which is to say what it claims.")
    print(f"{script.name} …", end=" ", flush=True)
    command = [sys.executable, str(script)]
    started = time.time()
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    seconds = time.time() - started
    if done.returncode:
        sys.exit(f"failed after {seconds:.0f} s.\n{done.stdout}{done.stderr}")
    picture = HERE / "pictures" / f"{script.stem}.svg"
    if not picture.exists() or picture.stat().st_mtime < started:
        sys.exit(f"did not write {picture}.")
    print(f"{seconds:.0f} s")

    title, _, text = claim.partition("\n")
    shown = re.search(r"<title>(.*?)</title>", picture.read_text(encoding="utf-8"), re.DOTALL)
    alt = shown[1] if shown else title
    machine = f"{os.cpu_count()} CPU cores, torch {version('torch')}"
    return f"""\
## {int(script.name[:2])}. {title.removesuffix(".")}

{text.strip()}

```console
$ python examples/{script.name}
{done.stdout.strip(chr(10))}
```

![{alt}](../examples/pictures/{picture.name})

The code is [examples/{script.name}](../examples/{script.name}); it ran for {seconds:.0f} s on {machine}.
"""


def table(pages: dict[int, str]) -> str:
    """The verdicts of all sections, a row for each claim, and the contents of the page."""
    rows, contents = ["| claim | verdict | what was measured | |", "|---|---|---|---|"], []
    for number, text in sorted(pages.items()):
        title = text.partition("\n")[0].removeprefix("## ")
        anchor = "#" + re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", title).lower())
        verdicts = [[cell.replace("|", "\\|") for cell in row] for row in VERDICT.findall(text)]
        rows += [f"| {' | '.join(row)} | [{number}]({anchor}) |" for row in verdicts]
        contents.append(f"{number}. [{title.partition(' ')[2]}]({anchor})")
    return "\n".join([*rows, "", *contents, ""])


def entries(page: str) -> dict[int, str]:
    """The sections of a page that was written before, by their numbers."""
    parts = re.split(r"^(?=## \d+\. )", page, flags=re.MULTILINE)[1:]
    return {int(part.split(".")[0][3:]): part.rstrip() + "\n" for part in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description="Run the examples and write docs/claims.md.")
    parser.add_argument("--only", type=int, metavar="N", help="run example N alone, and keep the other entries")
    only = parser.parse_args().only
    scripts = {int(script.name[:2]): script for script in sorted(HERE.glob("[0-9][0-9]_*.py"))}
    if only not in (None, *scripts):
        parser.error(f"there is no example {only}; there are {', '.join(map(str, scripts))}.")
    new = {number: entry(script) for number, script in scripts.items() if only in (None, number)}
    old = entries(PAGE.read_text(encoding="utf-8")) if only is not None and PAGE.exists() else {}
    kept = {number: old[number] for number in scripts if number in old}
    pages = dict(sorted((kept | new).items()))
    PAGE.write_text("\n".join([HEAD, table(pages), *pages.values()]), encoding="utf-8")
    print(f"wrote {os.path.relpath(PAGE)}")


if __name__ == "__main__":
    main()
