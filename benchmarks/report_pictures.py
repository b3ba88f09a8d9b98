"""``python -m benchmarks.report_pictures``: the pictures of the report in docs/, of a GPT planned for an H100.

Needs a Chromium and the package playwright, and no GPU. Takes about a minute.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser import DESKTOP, PHONE, browser, visit, why_there_is_none

DOCS = Path(__file__).parent.parent / "docs"
HEIGHTS = {PHONE: 2700, DESKTOP: 1900}  # px of the page that is shown
LAYER_SHOWN, LAYERS_HEIGHT = 2, 1450  # row of the layers that is unfolded; px
MODEL, BUDGET = "gpt-12x2048", "4.5GiB"


def write_report(path: Path) -> None:
    import recompile
    from benchmarks.reference import build

    model, tokens = build(MODEL)
    recompile.plan(model, tokens, hardware="h100", memory_budget=BUDGET).to_html(path)


def main() -> int:
    missing = why_there_is_none()
    if missing:
        print(f"no screenshots: {missing}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder, browser() as opened:
        path = Path(folder) / "report.html"
        write_report(path)
        for width, height in HEIGHTS.items():
            for scheme in ("light", "dark"):
                with visit(opened, path, width, scheme) as found:
                    picture = DOCS / f"report-{width}-{scheme}.png"
                    area = {"x": 0, "y": 0, "width": width, "height": height}
                    found.page.screenshot(path=picture, full_page=True, clip=area)
                    print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
        with visit(opened, path) as found:
            picture = DOCS / f"report-{DESKTOP}-layers.png"
            found.page.locator("tr.why summary").nth(LAYER_SHOWN).click()
            area = found.page.locator("section", has_text="Layer by layer").first.bounding_box()
            area["y"] += found.page.evaluate("window.scrollY")
            area["height"] = min(area["height"], LAYERS_HEIGHT)
            found.page.screenshot(path=picture, full_page=True, clip=area)
            print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
