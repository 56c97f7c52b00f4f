"""What README.md and docs/*.md show is what happens: their Python runs, and printed output is compared.

A file's ```python blocks run in order, in one namespace. A ```text block that follows one is what it prints.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_CODE = [page for page in PAGES if page.name != "claims.md"]  # that one is written by examples/build.py
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_every_block_runs_and_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what a page writes is not for the repository
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    assert any(block[1] == "python" for block in blocks)
    namespace: dict[str, object] = {"__name__": page.stem}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            if block[1] != "python":
                continue
            first_line = text.count("\n", 0, block.start(2))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * first_line + block[2], str(page), "exec"), namespace)
            shown = after[2] if after is not None and after[1] == "text" else ""
            assert printed.getvalue() == shown, f"{page.name}, line {first_line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    gallery = (ROOT / "docs" / "gallery.py").read_text(encoding="utf-8")
    drawn = {
        f"gallery/{name}.svg" for name in re.findall(r'Entry\(\s*"(.+?)"', gallery)
    }  # by `make docs`, when it runs
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
        assert target in drawn or (page.parent / target).exists(), target
