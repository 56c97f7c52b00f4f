"""A picture of a section of a report, for README: python docs/screenshot.py runs/demo/report.html try"""

import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

PICTURE = Path(__file__).with_name("report.png")
LARGEST = 150_000  # bytes: it is in git, and on the first screen of README


def main(page: Path, section: str) -> None:
    if not page.exists():
        sys.exit(f"there is no {page}: type make demo first.")
    browsers = map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=next(filter(None, browsers), None), args=["--no-sandbox"])
        tab = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        tab.goto(f"{page.resolve().as_uri()}#{section}")
        box = tab.locator(f"#{section}").bounding_box()
        if box is None:
            sys.exit(f"{page} shows no section {section}.")
        clip = {"x": 90, "y": box["y"] + 40, "width": 1020, "height": min(box["height"], 715) - 40}
        tab.screenshot(path=PICTURE, clip=clip)
        browser.close()
    size = PICTURE.stat().st_size
    print(f"wrote {PICTURE} ({size / 1e3:.0f} kB)")
    if size > LARGEST:
        sys.exit(f"that is more than {LARGEST / 1e3:.0f} kB: show less of the page.")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
