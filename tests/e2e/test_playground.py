"""The playground in a real browser, in front of a real server that asks for a key."""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import Browser, Error, Route, expect

from tests.browser import Visit, chromium
from tests.server import Server, serving

KEY = "a-key"
HEADERS = {"authorization": f"Bearer {KEY}"}
PROMPT = "a red circle on a white background"
LONG: dict[str, Any] = {"steps": 200, "side": 512}  # it does not come to its end here
SCHEMES = ("light", "dark")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--api-key", KEY, "--max-queue", "3", "--default-resolution", "128")
    with serving(None, tmp_path_factory.mktemp("server"), *flags) as running:
        yield running


@pytest.fixture
def visit(browser: Browser, server: Server) -> Iterator[Callable[..., Visit]]:
    """Open the playground, with the options of a browser's context; at the end, nothing must have gone wrong in it."""
    with ExitStack() as stack:

        def visit(path: str = "/", **options: Any) -> Visit:
            credentials = {"username": "anyone", "password": KEY}
            context = stack.enter_context(browser.new_context(http_credentials=credentials, **options))
            context.grant_permissions(["clipboard-read", "clipboard-write"])
            visit = Visit(context.new_page(), server.url)
            stack.callback(visit.check)
            visit.open(path)
            return visit

        yield visit
    wait_until_idle(server)


def wait_until_idle(server: Server) -> None:
    """Whatever a page has left behind is given up."""
    deadline = time.monotonic() + 30
    while httpx.get(f"{server.url}/health/ready").json() != {"status": "ready", "running": 0, "waiting": 0}:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def picture_file(folder: Path, name: str, colour: str = "blue", size: tuple[int, int] = (96, 64)) -> Path:
    path = folder / name
    Image.new("RGB", size, colour).save(path)
    return path


def test_a_browser_asks_for_the_key(browser: Browser, server: Server) -> None:
    with browser.new_context() as context, pytest.raises(Error, match="ERR_INVALID_AUTH_CREDENTIALS"):
        context.new_page().goto(server.url)


def test_from_a_prompt_to_a_picture(visit: Callable[..., Visit], server: Server) -> None:
    page = visit()
    expect(page.page.get_by_text("Nothing drawn yet.")).to_be_visible()
    page.order(PROMPT, steps=12)
    page.wait_until_done()
    [card] = page.cards.all()
    expect(card.locator(".prompt")).to_have_text(PROMPT)
    assert re.fullmatch(r"128 × 128 · 12 steps · guidance 1 · seed 7 · [\d.]+ s", page.figures()[0])
    assert len(page.shown("previews")) == 3
    assert {"Sending…"} < set(page.shown("states")) and any("of 12 · about " in state for state in page.shown("states"))
    assert page.shown("news")[-3:] == ["Sent.", "Being drawn.", f"Finished: {PROMPT}"]
    expect(page.page.get_by_text("Nothing drawn yet.")).to_be_hidden()

    fields = {"prompt": PROMPT, "seed": 7, "num_inference_steps": 12}
    answer = httpx.post(f"{server.url}/v1/images/generations", json=fields, headers=HEADERS, timeout=60).json()
    assert page.file_of(card) == base64.b64decode(answer["data"][0]["b64_json"])


def test_several_pictures_and_what_the_form_takes(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.page.get_by_role("radio", name="3:2").check()
    page.field("Guidance").fill("2.5")
    page.field("Negative prompt").fill("blue")
    page.order(PROMPT, seed=None, count=2)
    page.wait_until_done()
    first, second = page.figures()
    figures = re.compile(r"160 × 96 · 2 steps · guidance 2.5 · seed (\d+) · [\d.]+ s · without “blue”")
    seeds = [int(figures.fullmatch(text)[1]) for text in (first, second)]
    assert seeds[1] == (seeds[0] + 1) % 2**32

    page.order("another", steps=1, seed=1)
    page.wait_until_done()
    page.cards.nth(2).get_by_role("button", name="Reuse").click()
    values = [page.field(name).input_value() for name in ("Seed", "Pictures", "Steps", "Guidance")]
    assert values == [str(seeds[1]), "1", "2", "2.5"]
    expect(page.field("Prompt")).to_have_value(PROMPT)
    expect(page.field("Prompt")).to_be_focused()
    expect(page.page.get_by_role("radio", name="3:2")).to_be_checked()


def test_transparency_is_shown_on_a_checkerboard(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.order("a green ring on a transparent background", steps=4, side=256)  # the size that the model knows
    page.wait_until_done()
    style = "(picture) => getComputedStyle(picture).backgroundImage"
    assert "repeating-conic-gradient" in page.cards.locator("img").evaluate(style)
    alpha = Image.open(io.BytesIO(page.file_of(page.cards.first))).getchannel("A")
    assert alpha.getextrema()[0] < 16

    def as_opaque(route: Route) -> None:
        events = route.fetch(headers={**route.request.headers, **HEADERS}).text()
        route.fulfill(body=events.replace('"background":"transparent"', '"background":"opaque"'))

    page.page.route("**/v1/images/generations", as_opaque)
    page.order(PROMPT, side=64)
    page.wait_until_done()
    assert page.cards.first.locator("img").evaluate(style) == "none"


def test_up_to_four_images_by_drop_paste_and_choice(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit()
    thumbs = page.page.locator(".thumb")
    page.drop([picture_file(tmp_path, "a.png"), picture_file(tmp_path, "b.jpg", "red")])
    expect(thumbs).to_have_count(2)
    page.paste(picture_file(tmp_path, "c.png", "green").read_bytes())
    expect(thumbs).to_have_count(3)
    fault = page.page.locator("#images-error")
    expect(fault).to_have_text("")
    page.drop([picture_file(tmp_path, "d.webp"), picture_file(tmp_path, "e.png")])
    expect(thumbs).to_have_count(4)
    expect(fault).to_have_text("No more than 4 images can be used.")
    page.paste(picture_file(tmp_path, "f.png").read_bytes())
    expect(thumbs).to_have_count(4)
    expect(fault).to_have_text("No more than 4 images can be used.")

    colours = "(thumbs) => thumbs.map((thumb) => thumb.querySelector('img').naturalWidth)"
    assert thumbs.evaluate_all(colours) == [96] * 4
    page.page.get_by_role("button", name="Remove image 3").click()
    expect(page.page.get_by_role("button", name="Remove image 3")).to_be_focused()
    expect(fault).to_have_text("")
    (tmp_path / "notes.txt").write_text("no picture")
    with page.page.expect_file_chooser() as chooser:
        page.page.get_by_role("button", name="Drop, paste or choose").click()
    chooser.value.set_files([tmp_path / "notes.txt"])
    expect(fault).to_have_text("Only PNG, JPEG and WebP images can be used.")
    expect(thumbs).to_have_count(3)
    page.page.evaluate("navigator.clipboard.writeText('a text')")
    page.field("Prompt").focus()
    page.page.keyboard.press("Control+V")
    expect(page.field("Prompt")).to_have_value("a text")


def test_input_images_keep_their_order(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit()
    page.drop([picture_file(tmp_path, "wide.png", size=(128, 64)), picture_file(tmp_path, "tall.png", size=(64, 128))])
    expect(page.page.locator("#size-px")).to_have_text("the shape of the last image")
    page.order(PROMPT, steps=1)
    page.wait_until_done()
    page.page.get_by_role("button", name="Move image 2 one place forward").click()
    page.order(PROMPT, steps=1)
    page.wait_until_done()
    sizes = [text.split(" · ")[0] for text in page.figures()]
    assert sizes == ["192 × 96", "96 × 192"]
    expect(page.cards.first.locator(".params")).to_contain_text("seed 7 · 2 input images")


@pytest.mark.parametrize("kind", ["generation", "edit"])
def test_copied_commands_draw_the_same_picture(visit: Callable[..., Visit], tmp_path: Path, kind: str) -> None:
    page = visit()
    prompt = f'{PROMPT}, it\'s "quoted" \\ $HOME `id` & é 日\nand a second line'
    if kind == "edit":
        page.drop([picture_file(tmp_path, "blue.png"), picture_file(tmp_path, "not plain.jpg", "red")])
    page.order(prompt, steps=3)
    page.wait_until_done()
    if kind == "edit":
        (tmp_path / "blue.png").rename(tmp_path / "image-1.png")
        (tmp_path / "not plain.jpg").rename(tmp_path / "image-2.jpg")
    [card] = page.cards.all()
    picture = page.file_of(card)
    environment = {"PATH": os.environ["PATH"], "EASEL_API_KEY": KEY}
    for language, interpreter in (("curl", "bash"), ("Python", sys.executable)):
        text = page.copied(card, language)
        assert KEY not in text
        subprocess.run([interpreter, "-c", text], cwd=tmp_path, env=environment, check=True, timeout=120)
        assert (tmp_path / "picture.png").read_bytes() == picture
        (tmp_path / "picture.png").unlink()


def test_a_server_without_keys_needs_none_in_the_commands(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.page.route(
        "**/v1/models",
        lambda route: route.fulfill(body=route.fetch(headers=HEADERS).text().replace('key":true', 'key":false')),
    )
    page.open()
    page.order(PROMPT)
    page.wait_until_done()
    curl, python = (page.copied(page.cards.first, language) for language in ("curl", "Python"))
    assert "KEY" not in curl + python
    assert 'api_key="unused"' in python


def test_a_result_becomes_an_input(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.order(PROMPT, seed=5)
    page.wait_until_done()
    page.cards.first.get_by_role("button", name="Use as input").click()
    expect(page.page.locator(".thumb")).to_have_count(1)
    page.order("replace the circle with a star")
    page.wait_until_done()
    expect(page.cards.first.locator(".params")).to_contain_text("1 input image")
    assert "image[]=@easel-5.png" in page.copied(page.cards.first, "curl")


def test_cancel_and_try_again(visit: Callable[..., Visit], server: Server) -> None:
    page = visit()
    page.order(PROMPT, **LONG, count=2)
    expect(page.cards.first.locator(".state")).to_contain_text(re.compile(r"Step \d+ of 400"))
    page.order("the one behind it", **LONG)
    expect(page.cards).to_have_count(3)
    page.cards.nth(1).get_by_role("button", name="Cancel all").click()
    expect(page.cards).to_have_count(2)  # one card tells for both
    expect(page.cards.nth(1)).to_contain_text("Cancelled.")
    expect(page.cards.nth(1).get_by_role("button", name="Try again")).to_be_focused()
    page.cards.first.get_by_role("button", name="Cancel").click()
    expect(page.cards.first).to_contain_text("Cancelled.")
    wait_until_idle(server)
    page.cards.first.get_by_role("button", name="Dismiss").click()
    page.cards.first.get_by_role("button", name="Try again").click()
    expect(page.cards).to_have_count(2)
    page.cards.first.get_by_role("button", name="Cancel all").click()
    page.cards.first.get_by_role("button", name="Dismiss").click()
    expect(page.page.get_by_text("Nothing drawn yet.")).to_be_visible()


def test_a_full_queue_says_when_to_come_again(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.stop_clock()
    page.expected_status = 429
    for number in range(3):
        page.order(f"number {number}", **LONG)
        expect(page.cards.first.locator(".state")).not_to_have_text("Sending…")
    expect(page.cards.first.locator(".state")).to_contain_text("in the queue")
    page.order(PROMPT, side=64)
    refused = page.cards.first
    button = refused.get_by_role("button", name="Try again in")
    expect(button).to_have_attribute("aria-disabled", "true")
    seconds = int(re.search(r"in (\d+) s", button.inner_text())[1])
    page.page.clock.run_for(1000)
    expect(button).to_have_text(f"Try again in {seconds - 1} s")
    button.click(force=True)
    expect(page.cards).to_have_count(4)
    for card in page.cards.all()[1:]:
        card.get_by_role("button", name="Cancel").click()
        expect(card).to_contain_text("Cancelled.")
    page.page.clock.run_for(1000 * seconds)
    refused.get_by_role("button", name="Try again", exact=True).click()
    page.wait_until_done()
    expect(page.cards.first.locator(".params")).to_contain_text("seed 7")


def test_only_what_is_missing_is_drawn_again(visit: Callable[..., Visit]) -> None:
    page = visit()

    def cut_off(route: Route) -> None:
        events = route.fetch(headers={**route.request.headers, **HEADERS}).text()
        route.fulfill(body=events[: events.rindex("event: ")])

    page.page.route("**/v1/images/generations", cut_off)
    page.order(PROMPT, count=2)
    expect(page.cards.nth(0).locator(".params")).to_contain_text("seed 7")
    expect(page.cards.nth(1)).to_contain_text("The connection was lost.")
    page.page.unroute("**/v1/images/generations")
    page.cards.nth(1).get_by_role("button", name="Try again").click()
    page.wait_until_done()
    assert [re.search(r"seed \d", text)[0] for text in page.figures()] == ["seed 8", "seed 7"]


def test_faults_are_named_where_they_are(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.order(" ", steps=0)
    expect(page.field("Prompt")).to_be_focused()
    expect(page.page.locator("#prompt-error")).to_have_text("Say what to draw.")
    expect(page.page.locator("#numbers-error")).to_have_text("Steps are a whole number from 1 to 200.")
    expect(page.field("Steps")).to_have_attribute("aria-invalid", "true")
    expect(page.field("Steps")).to_have_accessible_description("Steps are a whole number from 1 to 200.")
    page.page.get_by_role("radio", name="Custom").check()
    page.field("Width").fill("1000")
    page.field("Height").fill("100")
    page.order(PROMPT)
    expect(page.page.locator("#size-error")).to_have_text("One side is at most 8 times the other.")
    expect(page.page.locator("#numbers-error")).to_have_text("")
    assert not page.cards.count()

    page.page.get_by_role("radio", name="Auto").check()
    page.expected_status = 400
    page.order("word " * 6000)
    expect(page.cards.first.locator(".words")).to_contain_text("tokens")
    expect(page.cards.first.get_by_role("button", name="Try again")).to_be_enabled()


def test_without_a_mouse(visit: Callable[..., Visit]) -> None:
    page = visit()
    keys, focused = page.page.keyboard, page.page.locator(":focus")
    keys.press("Tab")
    expect(focused).to_have_text("Skip to the pictures")
    keys.press("Tab")
    keys.type(PROMPT)
    for _ in range(2):
        keys.press("Tab")
    expect(focused).to_have_attribute("value", "auto")
    keys.press("ArrowRight")
    expect(page.page.get_by_role("radio", name="1:1")).to_be_checked()
    keys.press("Tab")
    keys.type("2")
    keys.press("Control+Enter")
    page.wait_until_done()
    expect(page.cards.locator(".params")).to_contain_text("128 × 128 · 2 steps")
    while not focused.evaluate("(element) => element.matches('.picture')"):
        keys.press("Tab")
        assert focused.count(), "the picture can't be reached"
    expect(focused).to_have_accessible_name(PROMPT)
    keys.press("Enter")
    expect(page.page.get_by_role("dialog")).to_be_visible()
    keys.press("Escape")
    expect(page.page.get_by_role("dialog")).to_be_hidden()
    expect(focused).to_have_class("picture")
    outline = focused.evaluate("(element) => getComputedStyle(element).outlineStyle")
    assert outline == "solid"


def test_behind_a_proxy_that_puts_it_into_a_folder(visit: Callable[..., Visit], server: Server) -> None:
    page = visit()
    page.page.route(
        f"{server.url}/folder/**", lambda route: route.continue_(url=route.request.url.replace("/folder/", "/"))
    )
    page.requested.clear()
    page.open("/folder/")
    page.order(PROMPT)
    page.wait_until_done()
    assert f"{server.url}/folder/v1/images/generations" in page.copied(page.cards.first, "curl")
    assert all(f"{server.url}/folder/" in url for url in page.requested)


def test_a_server_that_is_away_is_waited_for(visit: Callable[..., Visit]) -> None:
    page = visit()
    page.stop_clock()
    page.expected_status = 503
    page.page.route("**/v1/**", lambda route: route.fulfill(status=503, json={"reason": "The model is being loaded."}))
    page.order(PROMPT)
    expect(page.cards.first.locator(".words")).to_have_text("The model is being loaded.")
    expect(page.page.locator("#service")).to_have_text("The model is being loaded.")
    expect(page.page.get_by_role("button", name="Draw")).to_be_disabled()
    page.page.unroute("**/v1/**")
    page.page.clock.run_for(2000)
    expect(page.page.locator("#service")).to_have_text("easel-demo")
    expect(page.field("Prompt")).to_have_value(PROMPT)
    expect(page.page.get_by_role("button", name="Draw")).to_be_enabled()


def test_on_a_phone(visit: Callable[..., Visit], tmp_path: Path) -> None:
    page = visit(viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    page.page.get_by_role("radio", name="Custom").tap()
    page.page.locator("#files").set_input_files([picture_file(tmp_path, f"{number}.png") for number in range(5)])
    expect(page.page.locator(".thumb")).to_have_count(4)
    page.field("Negative prompt").fill("unbreakable" * 20)
    page.order("unbreakable" * 20)
    page.wait_until_done()
    expect(page.cards.first).to_be_in_viewport()
    assert page.page.evaluate("document.documentElement.scrollWidth") == 360
    assert page.page.evaluate("visualViewport.width") == 360
    boxes = page.page.locator("button:visible, a:visible, input:visible, textarea:visible").evaluate_all(
        "(all) => all.map((one) => one.getBoundingClientRect()).map(({width, height}) => Math.min(width, height))"
    )
    assert len(boxes) > 20
    assert min(side for side in boxes if side > 1) >= 24  # smaller is the link that shows on focus


@pytest.mark.parametrize("scheme", SCHEMES)
def test_contrast_names_and_motion(visit: Callable[..., Visit], tmp_path: Path, scheme: str) -> None:
    page = visit(color_scheme=scheme, reduced_motion="reduce", viewport={"width": 1280, "height": 1200})
    page.check_accessibility()
    page.drop([picture_file(tmp_path, "a.png"), picture_file(tmp_path, "b.png")])
    page.order(PROMPT, seed=1)
    page.wait_until_done()
    page.order("", steps=0)
    page.order(PROMPT, **LONG)
    page.check_accessibility()
    page.cards.first.get_by_role("button", name="Cancel").click()
    expect(page.cards.first).to_contain_text("Cancelled.")
    page.check_accessibility()

    paper = page.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (int(re.search(r"\d+", paper)[0]) > 128) == (scheme == "light")
    contrasts = page.contrasts()
    assert contrasts.pop("placeholder") >= 4.5
    assert min(contrasts.values()) >= 3, contrasts
    moving = "[...document.querySelectorAll('*')].map(getComputedStyle).filter((s) => s.transitionDuration !== '0s')"
    assert page.page.evaluate(f"{moving}.length") == 0
