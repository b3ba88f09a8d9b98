"""A headless browser for tests of the report: what is asked of it, and whether there is one."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE, DESKTOP = 390, 1280  # px
HEIGHT = 900


def chromium_path() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


def why_there_is_none() -> str | None:
    """What is missing for the tests, None where nothing is."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "the package playwright is not installed"
    if chromium_path() is None:
        return "no Chromium is found (Debian, Ubuntu: apt install chromium)"
    return None


@dataclass
class Visit:
    """A page that was opened, and what it said and asked for meanwhile."""

    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@contextlib.contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=chromium_path(), args=list(FLAGS))
        try:
            yield opened
        finally:
            opened.close()


@contextlib.contextmanager
def visit(opened: Any, path: Path, width: int = DESKTOP, scheme: str = "light") -> Iterator[Visit]:
    """Open a file at a width in px under a colour scheme."""
    context = opened.new_context(viewport={"width": width, "height": HEIGHT}, color_scheme=scheme)
    found = Visit(context.new_page())
    found.page.on("console", lambda message: found.messages.append(message.text))
    found.page.on("pageerror", lambda error: found.messages.append(str(error)))
    found.page.on("dialog", lambda dialog: (found.messages.append(dialog.message), dialog.dismiss()))
    found.page.on("request", lambda request: found.requests.append(request.url))
    try:
        found.page.goto(path.as_uri())
        yield found
    finally:
        context.close()
