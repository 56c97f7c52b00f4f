"""The pages of the site, for mkdocs: those of the repository under their own paths, and what is made of other files."""

import ast
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
SHOWN = ["README.md", "CHANGELOG.md", "docs/*.md", "docs/*.svg", "docs/*.png", "docs/gallery/*", "examples/pictures/*"]
EXAMPLE = re.compile(r"(?<=\]\()([\w./]*examples/\w+)\.py(?=\))")
REPORT = (
    "The report of a run",
    "`make demo` trains a model on the text of Python's own reference and writes this page on it.",
)
PLAY = ("A network that learns while you look", "`loopfold play` writes such a page, and so does `make demo`.")
LIVE = {"runs/demo/report.html": REPORT, "runs/demo/play.html": PLAY}  # pages that are shown where they are there


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for path in sorted(path for pattern in SHOWN for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    for script in sorted({*(ROOT / "examples").glob("*.py")} - {ROOT / "examples" / "build.py"}):
        files.append(File.generated(config, f"examples/{script.stem}.md", content=_example(script)))
    for page in _live():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / page)))
    files.append(File.generated(config, "live.md", content=_frames()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Links to the code of an example lead to the page that shows it."""
    return EXAMPLE.sub(r"\1.md", markdown)


def _example(script: Path) -> str:
    """What a script says of itself, its picture, and its code."""
    code = script.read_text(encoding="utf-8")
    title, _, text = (ast.get_docstring(ast.parse(code)) or script.name).partition("\n")
    picture = f"pictures/{script.stem}.svg"
    shown = f"![{title}]({picture})\n\n" if (script.parent / picture).exists() else ""
    return f"# {title.removesuffix('.')}\n\n{text.strip()}\n\n{shown}```python\n{code}```\n"


def _live() -> list[str]:
    return [page for page in LIVE if (ROOT / page).exists()]


def _frames() -> str:
    """Each page in a frame; where there is none, what to type for one."""
    text = "# Live pages\n\nEach is one file that needs no network and nothing else.\n"
    for page in _live():
        title, about = LIVE[page]
        frame = f'<iframe class="live" src="{page}" title="{title}"></iframe>'
        text += f"\n## {title}\n\n{about} [Open it alone]({page}).\n\n{frame}\n"
    return text if _live() else f"{text}\nThis site was built without them: type `make demo`, then `make docs`.\n"
