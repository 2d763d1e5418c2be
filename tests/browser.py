"""A headless Chromium that drives the playground, and notes what must not happen in a page."""

from __future__ import annotations

import base64
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page, expect, sync_playwright

REQUIRED = "REQUIRE_BROWSER"  # set where a missing browser is a failure, not a reason to skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
PATIENCE_MS = 60_000  # for a picture on a busy machine

# What the cards have shown, moment by moment: previews are gone too soon to be waited for.
WATCH = """
window.shown = {previews: new Set(), states: new Set(), news: new Set()};
new MutationObserver(() => {
  for (const picture of document.querySelectorAll('[aria-busy="true"] img[src]')) shown.previews.add(picture.src);
  for (const state of document.querySelectorAll('.card .state')) shown.states.add(state.textContent);
  shown.news.add(document.querySelector('#news').textContent);
}).observe(document.body, {subtree: true, childList: true, attributes: true, characterData: true});
"""

# The contrasts that axe does not look at.
CONTRASTS = """() => {
  const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (colour) => {
    const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = channels(colour).map((channel) => linear(channel / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (one, other) => {
    const [dark, light] = [luminance(one), luminance(other)].sort((a, b) => a - b);
    return (light + 0.05) / (dark + 0.05);
  };
  const mark = document.body.appendChild(document.createElement("i"));
  mark.style.color = "var(--accent)";
  const paper = getComputedStyle(document.body).backgroundColor;
  const of = (selector, part) => getComputedStyle(document.querySelector(selector), part);
  return {
    placeholder: contrast(of("#prompt", "::placeholder").color, of("#prompt").backgroundColor),
    field: contrast(of("#steps").borderTopColor, paper),
    chosen: contrast(of(".shape:has(:checked)").borderTopColor, paper),
    progress: contrast(getComputedStyle(mark).color, paper),
  };
}"""


@contextmanager
def chromium() -> Iterator[Browser]:
    """The installed browser; without one, tests are skipped, or fail where one is required."""
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        missing = "no Chromium is installed: apt-get install chromium"
        assert not os.environ.get(REQUIRED), missing
        pytest.skip(missing)
    with sync_playwright() as playwright:
        expect.set_options(timeout=PATIENCE_MS)
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


class Visit:
    """An open playground, and what its page has asked for and complained of."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.faults: list[str] = []
        self.requested: list[str] = []
        self.expected_status = 0  # that of a refusal which the test provokes: the browser reports it as an error
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.faults.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def _on_console(self, message: ConsoleMessage) -> None:
        is_expected = self.expected_status and f"status of {self.expected_status} " in message.text
        if message.type in ("error", "warning") and not is_expected:
            self.faults.append(message.text)

    def open(self, path: str = "/") -> None:
        self.page.goto(self.url + path)
        expect(self.page.locator("#service")).to_have_text("easel-demo")
        self.page.evaluate(WATCH)

    def check(self) -> None:
        """No errors on the console, and no request to anybody else."""
        assert self.faults == []
        elsewhere = [url for url in self.requested if not url.startswith((f"{self.url}/", f"blob:{self.url}/"))]
        assert elsewhere == []

    def check_accessibility(self) -> None:
        """What axe finds by itself: contrast of texts (AA), names, labels, roles, landmarks."""
        found = Axe().run(self.page)
        assert found.violations_count == 0, found.generate_report()

    def contrasts(self) -> dict[str, float]:
        contrasts: dict[str, float] = self.page.evaluate(CONTRASTS)
        return contrasts

    @property
    def cards(self) -> Locator:
        return self.page.locator("#gallery > .card")

    def field(self, name: str) -> Locator:
        return self.page.locator("#order").get_by_label(re.compile(f"^{name}"))

    def order(
        self, prompt: str, *, steps: int = 2, seed: int | None = 7, count: int = 1, side: int | None = None
    ) -> None:
        """Fill in the form and send it; with `side`, for a square of that many pixels."""
        if side is not None:
            self.page.get_by_role("radio", name="Custom").check()
            for name in ("Width", "Height"):
                self.field(name).fill(str(side))
        for name, value in (("Prompt", prompt), ("Steps", steps), ("Seed", seed), ("Pictures", count)):
            self.field(name).fill("" if value is None else str(value))
        self.page.get_by_role("button", name="Draw").click()

    def stop_clock(self) -> None:
        """From now on the page's timers run with `page.clock.run_for` only."""
        self.page.clock.install(time=0)
        self.page.clock.pause_at(1000)

    def wait_until_done(self) -> None:
        expect(self.page.locator("[aria-busy=true]")).to_have_count(0)

    def figures(self) -> list[str]:
        """The parameters under each picture."""
        return [text.replace("\N{NO-BREAK SPACE}", " ") for text in self.page.locator(".params").all_inner_texts()]

    def shown(self, what: str) -> list[str]:
        shown: list[str] = self.page.evaluate(f"[...shown.{what}]")
        return shown

    def file_of(self, card: Locator) -> bytes:
        with self.page.expect_download() as download:
            card.get_by_role("link", name="Download").click()
        return download.value.path().read_bytes()

    def copied(self, card: Locator, language: str) -> str:
        button = card.locator(f".{language.lower()}")
        expect(button).to_have_text(f"Copy as {language}")
        button.click()
        expect(button).to_have_text("Copied")
        text: str = self.page.evaluate("navigator.clipboard.readText()")
        return text

    def drop(self, files: list[Path]) -> None:
        """What a file manager does when files are let go over the page."""
        session = self.page.context.new_cdp_session(self.page)
        data = {"items": [], "files": [str(path) for path in files], "dragOperationsMask": 1}
        for kind in ("dragEnter", "dragOver", "drop"):
            session.send("Input.dispatchDragEvent", {"type": kind, "x": 300, "y": 300, "data": data})
        session.detach()

    def paste(self, png: bytes) -> None:
        """Put a picture into the clipboard, and press the keys."""
        self.page.evaluate(
            """async (data) => {
              const bytes = Uint8Array.from(atob(data), (char) => char.charCodeAt(0));
              const item = new ClipboardItem({"image/png": new Blob([bytes], {type: "image/png"})});
              await navigator.clipboard.write([item]);
            }""",
            base64.b64encode(png).decode(),
        )
        self.page.keyboard.press("Control+V")
