"""The viewer's page in a real browser: headless Chromium."""

import os
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Serve, Stand
from tests.gateway.viewer_worlds import ANSWERS, KEY, MARKUP, Busy, surprising, write_long_session

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
if CHROMIUM is None:
    warnings.warn("no Chromium on this machine: the viewer's page is NOT TESTED", stacklevel=1)

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium on this machine: apt-get install chromium"
)
LONG_TURNS = 2000
MOST_ELEMENTS = 5000  # in the document, whatever a session holds

NAMELESS = """[...document.querySelectorAll('button, input, [tabindex="0"]')].filter(e => !(
  e.getAttribute("aria-label") || e.getAttribute("aria-labelledby")
  || e.textContent.trim() || e.labels?.length
))"""
BRIGHTNESS = """getComputedStyle(document.body).backgroundColor.match(/\\d+/g)
  .slice(0, 3).map(Number).reduce((a, b) => a + b)"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


class Page:
    """The viewer as a person at the keyboard has it."""

    def __init__(self, browser: Any, stand: Stand, **options: Any) -> None:
        self._context = browser.new_context(viewport={"width": 1400, "height": 850}, **options)
        self.page = self._context.new_page()
        self.page.set_default_timeout(20_000)
        self.errors: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(stand.url + "/viewer")

    def log_in(self, key: str = KEY) -> None:
        self.page.fill("#key", key)
        self.page.keyboard.press("Enter")

    def open(self) -> None:
        """Open the first session by keyboard, and wait for its tokens."""
        self.log_in()
        self.page.wait_for_selector("#session-list .row")
        self.page.keyboard.press("Enter")
        self.page.wait_for_selector("#tokens .t")

    def press(self, *keys: str) -> None:
        for key in keys:
            self.page.keyboard.press(key)

    def text(self, selector: str) -> str:
        found: str = self.page.locator(selector).first.inner_text()
        return found

    def wait_for(self, selector: str, text: str) -> None:
        self.page.locator(selector, has_text=text).first.wait_for()

    def until(self, condition: str) -> None:
        """Wait for an expression: the page's policy lets no other script evaluate one."""
        for _ in range(200):
            if self.page.evaluate(condition):
                return
            self.page.wait_for_timeout(50)
        raise AssertionError(condition)

    def focused(self) -> str:
        found: str = self.page.evaluate("document.activeElement.id")
        return found

    def elements(self) -> int:
        found: int = self.page.evaluate("document.querySelectorAll('*').length")
        return found

    def close(self) -> None:
        assert self.errors == []
        assert not [url for url in self.urls if KEY in url or KEY.replace(" ", "%20") in url]
        self._context.close()


@pytest.fixture
def stand(serve: Serve) -> Stand:
    return serve(ANSWERS, admin_key=KEY, engine={"logprob": surprising})


@pytest.fixture
def page(browser: Any, stand: Stand) -> Iterator[Page]:
    Busy(stand)
    made = Page(browser, stand)
    yield made
    made.close()


def test_a_wrong_key_is_told_and_the_right_one_opens(page):
    page.page.wait_for_selector("#key")
    page.log_in("not-the-key")
    page.wait_for("#login-message", "This is not the gateway's admin key.")
    page.log_in("schlüssel")
    page.wait_for("#login-message", "plain letters")
    page.log_in()
    page.wait_for("#count", "1 session")
    page.page.reload()
    page.wait_for("#count", "1 session")  # the tab still knows the key
    page.page.click("#lock")
    page.page.wait_for_selector("#login:not([hidden])")
    assert page.page.evaluate("sessionStorage.length") == 0


def test_without_an_admin_key_nothing_is_asked(browser, serve):
    page = Page(browser, serve(ANSWERS))
    page.wait_for("#welcome-text", "No session yet")
    page.close()


def test_tree_tokens_and_mismatches_are_shown(page):
    page.open()
    assert page.text("#tree-count") == "5 turns, 2 roots"
    turns = page.page.locator("#tree .turn")
    assert turns.count() == 5
    assert page.page.locator("#tree .superseded").count() == 1
    assert page.page.locator("#tree .chip.branch").count() == 2
    assert page.page.locator("#tree .chip.root").count() == 2
    page.wait_for("#versions", "version 2")
    shown = page.page.eval_on_selector_all(
        "#tokens .t", "spans => spans.map(span => span.textContent).join('')"
    )
    assert "Thelargestfileisnotes.txt,na·ïvely.<|im_end|>" in shown.replace(" ", "")
    loss = page.page.locator("#tokens .t.loss")
    assert loss.count() > 50
    page.page.locator("#tokens .t.loss", has_text="<think>").first.hover()
    for fact in ("log-prob", "probability", "version", "position", "id", "mask"):
        assert fact in page.text("#inspector")
    page.wait_for("#tiles", "mismatches")
    page.wait_for("#tab-mismatches", "1")
    assert page.page.locator("#tokens .t.differs").count() > 0
    page.press("2")
    page.wait_for(".mismatch", "harness: it rewrote tool_calls.arguments")
    assert "timeout" in page.text(".side.expected")
    assert "timeout" not in page.text(".side.held .text")
    page.page.click(".mismatch button.link")
    page.page.wait_for_selector("#tokens .t.differs[aria-selected=true]")
    page.press("3")
    page.wait_for("#panel-details", "call_id")


def test_the_keyboard_is_enough(page):
    page.open()
    assert page.focused() == "tree"
    page.press("Home", "ArrowDown")
    page.wait_for("#row-title", "superseded")
    page.press("ArrowDown")
    page.wait_for("#row-title", "to turn 3")
    page.press("ArrowRight")
    assert page.focused() == "tokens"
    page.press("Home")
    page.wait_for("#inspector", "position0mask")
    page.press("ArrowRight", "ArrowRight")
    page.wait_for("#inspector", "position2mask")
    page.press("ArrowDown")
    assert "position2mask" not in page.text("#inspector").replace("\n", "")
    page.press("ArrowLeft", "]")
    page.wait_for("#inspector", "turn2")
    page.press(">")
    page.wait_for("#row-title", "to turn 4")
    page.press("Escape")
    assert page.focused() == "tree"
    page.press("Escape")
    assert page.focused() == "session-list"
    page.press("/")
    page.page.keyboard.type("attempt=1 largest")
    page.wait_for("#count", "1 session")
    page.page.keyboard.type(" nothing of the kind")
    page.wait_for("#count", "0 of 1 sessions")
    page.press("Escape")
    page.wait_for("#count", "1 session")
    page.press("?")
    page.page.wait_for_selector("#help[open]")
    page.press("Escape")
    assert page.page.locator("#help[open]").count() == 0
    assert page.page.evaluate(NAMELESS) == []
    current = page.page.evaluate("document.getElementById('tree').getAttribute('aria-activedescendant')")
    assert page.page.locator(f"#{current}[role=treeitem][aria-selected=true]").count() == 1


class Talk:
    """A session that goes on turn by turn."""

    def __init__(self, stand: Stand) -> None:
        self._http = httpx.Client(base_url=stand.url, headers={"authorization": f"Bearer {KEY}"})
        self.id: str = self._http.post("/sessions", json={}).json()["id"]
        self._messages: list[dict[str, str]] = []

    def go_on(self, turns: int = 1) -> None:
        for _ in range(turns):
            self._messages.append({"role": "user", "content": "Go on, please. " * 60})
            body = {"model": "m", "messages": self._messages}
            answer = self._http.post(f"/sessions/{self.id}/v1/chat/completions", json=body)
            message = answer.raise_for_status().json()["choices"][0]["message"]
            self._messages.append({"role": "assistant", "content": message["content"]})


MARKED = "#tokens .block[data-mark]"
MARK = "document.querySelector('#tokens .block').dataset.mark = 'as it was'"
TOP = "document.getElementById('tokens').scrollTop"
AT_END = "(t => t.scrollHeight - t.clientHeight - t.scrollTop < 60)(document.getElementById('tokens'))"


def test_new_turns_and_sessions_appear_while_a_person_looks_on(browser, serve):
    stand = serve(["I go on."], admin_key=KEY, engine={"context_length": 60_000})
    talk = Talk(stand)
    talk.go_on(3)
    page = Page(browser, stand)
    page.open()
    page.wait_for("#tree-count", "3 turns")
    page.wait_for("#live", "live")
    # In the middle of the row nothing moves, and what is shown is not made anew.
    page.page.locator("#tokens .t").first.hover()
    page.page.mouse.wheel(0, 40)
    page.until(f"{TOP} === 40")
    page.page.evaluate(MARK)
    talk.go_on()
    page.wait_for("#tree-count", "4 turns")
    page.wait_for("#row-title", "to turn 3")
    page.wait_for("#tiles", "4")
    assert page.page.locator(MARKED).count() == 1
    assert page.page.evaluate(TOP) == 40
    assert page.page.locator("#tree .turn[aria-selected=true] b").inner_text() == "0"
    # At its end the view goes with it.
    page.press("End")
    page.wait_for("#inspector", "turn3")
    page.page.mouse.wheel(0, 100_000)
    page.until(AT_END)
    for turn in (4, 5, 6):
        talk.go_on()
        page.wait_for("#row-title", f"to turn {turn}")
        page.wait_for("#tokens .sampled .head", f"turn {turn}")
        page.until(AT_END)
        assert page.page.locator("#tree .turn[aria-selected=true] b").inner_text() == str(turn)
    shown = page.page.eval_on_selector_all(
        "#tokens .t", "spans => spans.map(span => span.textContent).join('')"
    )
    assert shown.count("I go on.") >= 2
    page.wait_for("#count", "1 session")
    Talk(stand).go_on()
    page.wait_for("#count", "2 sessions")
    assert page.text("#session-id") == talk.id
    page.close()


def test_a_session_without_turns_fills_before_the_eyes(browser, serve, tmp_path: Path):
    stand = serve(["I go on."], admin_key=KEY, journal=tmp_path / "journal.sqlite")
    talk = Talk(stand)
    page = Page(browser, stand)
    page.log_in()
    page.page.wait_for_selector("#session-list .row")
    page.page.keyboard.press("Enter")
    page.wait_for("#row-title", "no turn yet")
    talk.go_on()
    page.page.wait_for_selector("#tokens .t.loss")
    assert page.page.locator("#tree .turn").count() == 1
    stand.restart()
    talk.go_on()
    page.wait_for("#tree-count", "2 turns")
    page.wait_for("#live", "live")
    page.close()


def test_words_of_agents_never_become_markup(page):
    page.open()
    page.press("Home", "ArrowDown")
    page.wait_for("#row-title", "superseded")
    page.page.wait_for_timeout(300)
    shown = page.page.eval_on_selector_all(
        "#tokens .t", "spans => spans.map(span => span.textContent).join('')"
    )
    assert MARKUP in shown
    assert "⟨200D⟩" in shown  # what would join two characters unseen has its name
    assert MARKUP[:20] in page.text("#labels")
    assert page.page.evaluate("window.hacked") is None
    assert page.page.locator("img, #app script").count() == 0


def test_light_and_dark(browser, stand):
    Busy(stand)
    seen = {}
    for scheme in ("light", "dark"):
        page = Page(browser, stand, color_scheme=scheme)
        page.open()
        seen[scheme] = page.page.evaluate(BRIGHTNESS)
        page.press("t", "t")  # system, light, dark
        seen[scheme + " made dark"] = page.page.evaluate(BRIGHTNESS)
        page.page.reload()
        page.page.wait_for_selector("#tokens .t")
        assert page.page.evaluate(BRIGHTNESS) == seen[scheme + " made dark"]
        page.close()
    assert seen["light"] > 600 > 150 > seen["dark"]
    assert seen["light made dark"] == seen["dark made dark"] == seen["dark"]


def test_thousands_of_turns_do_not_freeze_it(browser, serve, assets, tmp_path: Path):
    length = write_long_session(tmp_path / "journal.sqlite", assets, LONG_TURNS)
    assert length > 64_000
    page = Page(browser, serve(ANSWERS, admin_key=KEY, journal=tmp_path / "journal.sqlite"))
    page.open()
    counts = [page.elements()]
    page.press("End")
    page.wait_for("#tokens .head", f"turn {LONG_TURNS - 1}")
    counts.append(page.elements())
    for where in (0.25, 0.5, 0.75):
        page.page.evaluate(
            f"(t => t.scrollTop = t.scrollHeight * {where})(document.getElementById('tokens'))"
        )
        page.page.wait_for_timeout(250)
        counts.append(page.elements())
    page.page.wait_for_selector("#tokens .t")
    page.press("2")
    page.page.wait_for_selector(".mismatch .cause", timeout=60_000)
    page.page.evaluate("(m => m.scrollTop = m.scrollHeight / 2)(document.getElementById('mismatches'))")
    page.page.locator(".mismatch .line b", has_text=re.compile(r"^\d{3,}$")).first.wait_for()
    counts.append(page.elements())
    page.press("1")
    # Scrolled through by the frame, no frame takes long.
    slowest = page.page.evaluate(
        """async () => {
          const tokens = document.getElementById("tokens");
          let slowest = 0;
          for (let i = 0, last = performance.now(); i < 60; i++) {
            tokens.scrollTop += 900;
            await new Promise(requestAnimationFrame);
            const now = performance.now();
            slowest = Math.max(slowest, now - last);
            last = now;
          }
          return slowest;
        }"""
    )
    counts.append(page.elements())
    assert max(counts) < MOST_ELEMENTS, counts
    assert slowest < 1000, f"a frame took {slowest:.0f} ms"
    page.close()
