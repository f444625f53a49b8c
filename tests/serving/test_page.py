"""The page in a headless Chromium: a chat streams, caches fill, a mistake is shown."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Route, expect, sync_playwright

from tests.helpers.http_server import HttpServer

pytestmark = pytest.mark.browser
Serve = Callable[..., HttpServer]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Callable[[], Page]]:
    """Opens pages that fail the test on any script error or request to another host."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        yield lambda: browser.new_page(viewport={"width": 1100, "height": 900})
        browser.close()


def open_page(chromium: Callable[[], Page], server: HttpServer) -> tuple[Page, list[str]]:
    page, problems = chromium(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith(server.url) else problems.append(r.url))
    page.goto(server.url)
    return page, problems


def endless(route: Route) -> str:
    """The body of the page's request, so that the model does not end before the limit."""
    return json.dumps({**json.loads(route.request.post_data or ""), "ignore_eos": True})


def test_a_chat_streams_and_the_caches_follow(
    chromium: Callable[[], Page], serve_bundled: Serve, tmp_path: Path
) -> None:
    server = serve_bundled()
    page, problems = open_page(chromium, server)
    expect(page.locator("#model")).to_have_text("lara-kjv")
    expect(page.locator("#facts")).to_contain_text("2 linear, 2 window, 1 full")
    page.fill("#limit", "12")
    page.fill("#text", "Who made <b>the</b> heaven?")
    page.click("#send")
    expect(page.locator(".user")).to_have_text("Who made <b>the</b> heaven?")  # as text
    expect(page.locator("#send")).to_be_visible(timeout=60_000)  # the answer is complete
    answer = page.locator(".assistant").first.text_content()
    assert answer and answer.strip()
    used = page.locator(".class[data-name=rows] span")
    page.route("**/v1/chat/completions", lambda route: route.continue_(post_data=endless(route)))
    page.fill("#limit", "400")
    page.fill("#text", "And then?")
    page.click("#send")
    expect(used).to_have_text("1 + 0 of 8", timeout=30_000)  # live, while it runs
    page.click("#stop")
    expect(used).to_have_text("0 + 0 of 8", timeout=30_000)
    assert page.locator("#rows tr").count() >= 3
    expect(page.locator("#rows")).to_contain_text("gated_delta_rule")
    page.screenshot(path=str(tmp_path / "page.png"))
    assert problems == []


def test_a_mistake_is_shown_and_the_chat_goes_on(
    chromium: Callable[[], Page], serve_bundled: Serve, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("secret")
    page, problems = open_page(chromium, serve_bundled(api_key_file=tmp_path / "keys"))
    expect(page.locator("#facts")).to_contain_text("API key")
    page.fill("#text", "Hello")
    page.click("#send")
    expect(page.locator(".error")).to_contain_text("API key")
    page.fill("#key", "secret")
    expect(page.locator("#model")).to_have_text("lara-kjv", timeout=30_000)
    page.fill("#limit", "3")
    page.fill("#text", "Hello")
    page.click("#send")
    expect(page.locator(".assistant").last).not_to_be_empty(timeout=60_000)
    assert problems == []
