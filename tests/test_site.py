"""The documentation site: all of it is there, links lead to headings, and it works in a browser with no network."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import loopfold as lf

try:
    from playwright.sync_api import sync_playwright
except ImportError:
    sync_playwright = None  # type: ignore[assignment]

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REFERENCE = sorted((ROOT / "docs" / "site" / "reference").glob("*.md"))


def test_every_public_name_is_in_the_reference_once() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE)
    assert sorted(re.findall(r"^::: loopfold\.(\w+)$", text, re.MULTILINE)) == sorted(lf.__all__)


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.relative_to(ROOT) for page in PAGES] + [page.relative_to(ROOT / "docs/site") for page in REFERENCE]
    assert [str(page) for page in pages if f": {page.as_posix()}\n" not in contents] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page, as mkdocs and code-hosting sites both spell them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).strip().lower()) for heading in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_headings(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8")):
        assert anchor in headings(page.parent / target if target else page), f"{target}#{anchor}"


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="no mkdocs: make docs")
@pytest.mark.skipif(CHROMIUM is None or sync_playwright is None, reason="no browser")
def test_the_site_needs_no_network_and_finds_what_is_searched_for(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        tab = browser.new_context(offline=True).new_page()
        tab.on("request", lambda r: None if r.url.startswith((tmp_path.as_uri(), "data:")) else wrong.append(r.url))
        tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.goto((tmp_path / "docs" / "gallery.html").as_uri())
        tab.locator("input.md-search__input").press_sequentially("Checkpointed")
        tab.locator('.md-search-result__link[href*="reference/engines.html"]').first.wait_for(timeout=10_000)
        tab.goto((tmp_path / "reference" / "engines.html").as_uri())
        assert "5 √τ by default" in tab.locator("main").inner_text()  # from the docstring of Checkpointed
        browser.close()
    assert not [address for address in wrong if not address.startswith("about:")]


def test_the_figures_of_the_verdicts_are_those_of_the_experiments() -> None:
    table, *sections = re.split(
        r"^(?=## \d+\. )", (ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), flags=re.M
    )
    rows = re.findall(r"^\| (.*) \| \[(\d+)\]\(#.*\) \|$", table, re.MULTILINE)
    assert {int(number) for _, number in rows} == {*range(1, 1 + len(sections))}  # every experiment has a verdict
    for row, number in rows:
        printed = "\n".join(re.findall(r"^```console\n(.*?)^```$", sections[int(number) - 1], re.MULTILINE | re.DOTALL))
        lines = [numbers(line) for line in printed.splitlines() if not line.startswith(("holds if ", "figures "))]
        for clause in re.split(r"[,;:] | and ", row.rpartition(" | ")[2]):
            measured = {figure for figure in numbers(clause) if re.search(r"\D", figure)}
            assert any(measured <= line for line in lines), (row, measured)  # what is said together is one line there
            assert numbers(clause) <= set().union(*lines), (row, clause)


def numbers(text: str) -> set[str]:
    """Whole numbers and figures with their units: 1.000 is not 1, and 8,192 is not 8."""
    return set(re.findall(r"\d[\d.,e+-]*\d%?|\d+%?", text))
