"""The page in a real Chromium: every state, both themes, a phone, the keyboard, hostile names, and a live server."""

import re
from collections.abc import Iterator

import pytest

from tests.page.states import STATES, Pages
from tests.support.answers import Answer, answering
from tests.support.browser import Browser
from tests.support.page_runs import HOSTILE
from tests.support.web import Site, listening

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}
CONTRAST = """
const channel = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
const numbers = (text) => text.match(/[0-9.]+/g).map(Number);
const ground = (at) => {
  for (; at; at = at.parentElement) {
    const found = numbers(getComputedStyle(at).backgroundColor);
    if (found.length < 4 || found[3] === 1) return found;
  }
  return [255, 255, 255];
};
const bad = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const at = walk.currentNode.parentElement, box = at.getBoundingClientRect();
  const text = walk.currentNode.textContent.trim();
  if (!text || !box.width || ['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(at.tagName)) continue;
  const style = getComputedStyle(at), color = at.closest('svg') ? style.fill : style.color;
  const [a, b] = [light(numbers(color)), light(ground(at))].sort((x, y) => y - x);
  if ((a + 0.05) / (b + 0.05) < 4.5) bad.push([text.slice(0, 40), color, (a + 0.05) / (b + 0.05)]);
}
return bad;
"""
CUT = """
return [...document.querySelectorAll('body *')].filter((at) => {
  const box = at.getBoundingClientRect();
  return box.width > 0 && box.right > innerWidth + 1 && !at.closest('.scroll') && !at.closest('.skip');
}).map((at) => at.tagName + '.' + at.className).slice(0, 5);
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    return Pages(tmp_path_factory.mktemp("pages"), versions=2000)


@pytest.mark.parametrize("name", STATES)
def test_every_state_is_legible_in_both_themes_and_on_a_phone(window: Browser, pages: Pages, name: str) -> None:
    url = pages.url(name)
    for look in ({}, {"dark": True}, PHONE, {**PHONE, "dark": True}):
        window.look(**look)  # type: ignore[arg-type]
        window.open(url)
        assert window.script("return document.documentElement.scrollWidth <= innerWidth"), (name, look)
        assert window.script(CUT) == [], (name, look)
        assert window.script(CONTRAST) == [], (name, look)
    assert window.complaints() == []
    assert window.hosts() <= {""}
    for words in STATES[name].words:
        assert words in window.text(), words


def test_hostile_names_are_text(window: Browser, pages: Pages) -> None:
    window.look()
    window.open(pages.url("hostile"))
    window.script("document.querySelectorAll('details').forEach((at) => { at.open = true; })")
    assert "owned" not in window.script("return document.title").replace(HOSTILE[1], "")
    counts = window.script(
        "return ['img', 'script', 'iframe', 'object', 'link'].map((n) => document.querySelectorAll(n).length)"
    )
    assert counts == [0, 2, 0, 0, 1]
    assert (
        window.script(
            "return [...document.querySelectorAll('*')].some((at) => at.hasAttribute('onerror') || at.onload)"
        )
        is False
    )
    text = window.text()
    for hostile in HOSTILE[:3]:
        assert hostile in text
    # A character that turns text around is shown by its number.
    assert "\u202e" not in text
    assert "\\u202egnp.exe" in text


def test_the_policy_refuses_what_a_mistake_could_let_through(window: Browser, pages: Pages) -> None:
    window.look()
    window.open(pages.url("busy"))
    for mistake in (
        "document.body.insertAdjacentHTML('beforeend', '<b>x</b>')",
        "document.body.innerHTML = ''",
        "document.createElement('img').setAttribute('onerror', 'window.ran = 1')",
        "setTimeout('window.ran = 1')",
        "document.createElement('script').text = 'window.ran = 1'",
    ):
        refused = f"try {{ {mistake}; return 'done'; }} catch (error) {{ return error.name; }}"
        assert window.script(refused) == "TypeError", mistake
    window.script(
        "const made = document.createElement('p'); made.setAttribute('style', 'top: 7px'); document.body.append(made);"
        "window.kept = made.style.top;"
    )
    with answering() as other:
        other.reply = lambda asked: Answer(200, b"{}", {"Access-Control-Allow-Origin": "*"})
        window.script(
            "fetch(arguments[0]).then(() => { window.sent = 'yes'; }, () => { window.sent = 'no'; })", other.url
        )
        assert window.until("return window.sent") == "no"
        assert other.asked == []
    assert window.script("return [window.ran === undefined, window.kept]") == [True, ""]
    assert any("Content Security Policy" in line for line in window.complaints())
    window.hosts()


def test_everything_is_reached_by_the_keyboard(window: Browser, pages: Pages) -> None:
    window.look()
    window.open(pages.url("busy"))
    reached = []
    for _ in range(20):
        window.press("Tab")
        where = window.script(
            "const at = document.activeElement; return [at.tagName, at.className, getComputedStyle(at).outlineStyle]"
        )
        if where[0] == "BODY":
            break
        reached.append(where)
        assert where[2] != "none", where
    names = [f"{tag}.{kind}" for tag, kind, _ in reached]
    assert names[0] == "A.skip"
    # The versions, and the pauses of two servers.
    assert [names.count(name) for name in ("DIV.chart", "DIV.heat", "SUMMARY.")] == [3, 1, 2]
    window.script("document.querySelector('#timeline .chart').focus()")
    readout = "#timeline .readout"
    newest = window.text(readout)
    assert newest.startswith("Version 200 ")
    # When it was published, not its age: the text is made once, and stays while nothing new comes.
    assert re.search(r" · \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", newest)
    window.press("ArrowLeft", "ArrowLeft")
    assert window.text(readout).startswith("Version 198 ")
    window.press("Home")
    assert window.text(readout).startswith("Version 1 ")
    window.press("End")
    assert window.text(readout) == newest
    window.script("document.querySelector('.heat').focus()")
    first = window.text("#heat .readout")
    window.press("ArrowRight", "ArrowDown")
    assert "%" in first
    assert window.text("#heat .readout") != first
    window.script("document.querySelector('#timeline summary').focus()")
    window.press("Enter")
    assert "2,000" in window.text("#timeline .table")


# Live


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The routes of a server in front of a real receiver."""
    found = Site(tmp_path_factory.mktemp("site"), receiver_id="rollout-1", poll_seconds=0.1)
    found.serve()
    yield found
    found.end()


def test_the_page_of_a_server_follows_it_and_keeps_focus(window: Browser, site: Site) -> None:
    window.look()
    window.hosts()
    with listening(site.app) as port:
        window.open(f"http://127.0.0.1:{port}/delta_sync/")
        window.until("return document.querySelector('#timeline').hidden === false")
        assert window.text("#live") == "live"
        window.script("document.querySelector('#timeline .chart').focus()")
        before = window.text("#timeline .readout")
        site.publish(1)
        site.publish(2)
        window.until("return document.getElementById('headline').textContent === 'Version 2 is served, the newest'")
        window.until("return document.querySelectorAll('#timeline .chart rect.bar').length >= 4")
        assert window.script("return document.activeElement.className") == "chart"
        # The version that was chosen stays chosen: it is still the first word.
        assert window.text("#timeline .readout").split(" · ")[0] == before.split(" · ")[0]
        assert "rollout-1" in window.until("return document.querySelector('#receivers .body').innerText")
        assert "delta-sync dashboard" in window.text("#heat .about")
        assert window.hosts() == {f"127.0.0.1:{port}"}
        assert window.complaints() == []
    window.until("return document.getElementById('live').className === 'lost'")
    assert "does not answer" in window.text("#live")
    # What was shown stays.
    assert window.text("#headline") == "Version 2 is served, the newest"
    window.complaints()
