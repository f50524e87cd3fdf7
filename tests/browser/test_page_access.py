"""The page by keys alone, to the ear and to the eye: any operator can use it, whatever reads the screen to them."""

from itertools import pairwise

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Browser
from tests.browser.looking import PIXELS, chunk, map_point, polled
from tests.browser.served import Served

pytestmark = pytest.mark.nightly

FOCUSED = "return document.activeElement.id || document.activeElement.textContent.trim()"
SEEN_FOCUS = """
const node = document.activeElement, shown = node.closest("label") || node;
const style = getComputedStyle(shown), box = shown.getBoundingClientRect();
return [style.outlineStyle, parseFloat(style.outlineWidth), box.width > 0 && box.height > 0 && box.top >= 0];
"""
COUNT_WHAT_IS_SAID = """
window.said = 0;
const watcher = new MutationObserver(() => { window.said += 1; });
watcher.observe(document.querySelector("#live"), { childList: true, characterData: true, subtree: true });
"""
SHOW_ALARMS = """
for (const alarm of document.querySelectorAll(".alarm")) { alarm.textContent = "x"; alarm.hidden = false; }
"""


# ---- by keys alone ---------------------------------------------------------------------------------------------------


def test_everything_can_be_reached_and_worked_by_keys_alone(browser: Browser, served: Served) -> None:
    browser.press(Keys.TAB)
    assert browser.run(FOCUSED) == "Skip to the content"
    assert browser.run(SEEN_FOCUS) == ["solid", 2, True]
    browser.press(Keys.ENTER)
    browser.press(Keys.TAB)  # behind the links: the choice of colours
    assert browser.run("return document.activeElement.name") == "colouring"
    browser.press(Keys.ARROW_RIGHT)
    assert browser.run("return colouring") == "lease"
    browser.press(Keys.TAB)
    assert browser.run(FOCUSED) == "map"
    assert browser.run(SEEN_FOCUS) == ["solid", 2, True]
    browser.press(Keys.HOME, Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
    columns = browser.run("return layout.columns")
    assert browser.find("#map").get_attribute("aria-valuenow") == str(columns + 1)
    assert str(browser.find("#map").get_attribute("aria-valuetext")).startswith("At ")
    browser.press(Keys.END)
    assert browser.find("#map").get_attribute("aria-valuenow") == browser.find("#map").get_attribute("aria-valuemax")
    browser.press(Keys.HOME, Keys.ENTER)
    browser.until(lambda: browser.find_all("#here tbody button"))
    browser.press(Keys.TAB)
    assert browser.run("return document.activeElement.closest('#here') !== null")
    browser.press(Keys.ENTER)
    assert browser.facts("#here")["Place"].endswith("into the arena")
    chosen = browser.run("return document.activeElement.getAttribute('aria-current')")
    assert chosen == "true"


def test_a_key_is_searched_and_chosen_by_keys_alone(browser: Browser) -> None:
    browser.until(lambda: browser.find_all("#results tbody button"))
    browser.run("document.querySelector('#keys a, #prompts tbody tr:last-child button').focus()")
    browser.press(Keys.TAB)
    assert browser.run("return document.activeElement.name") == "prefix"
    browser.press(*"session:1", Keys.ENTER)
    browser.until(lambda: "11 keys" in browser.text("#results caption"))
    browser.press(Keys.TAB, Keys.TAB, Keys.TAB)
    assert browser.run(FOCUSED) == "session:1"
    assert browser.run(SEEN_FOCUS) == ["solid", 2, True]
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_UP, Keys.ENTER)
    assert browser.facts("#results")["Key"] == "session:10"


def test_focus_stays_where_it_is_while_the_tables_are_kept_up_to_date(browser: Browser) -> None:
    browser.run("document.querySelectorAll('#prompts tbody button')[1].focus()")
    before = browser.run(FOCUSED)
    polled(browser, 3)
    assert browser.run(FOCUSED) == before


# ---- to the ear ------------------------------------------------------------------------------------------------------


def test_what_can_be_worked_or_visited_has_a_name(browser: Browser) -> None:
    roles = browser.roles()
    named = {"button", "link", "slider", "radio", "searchbox", "combobox", "table", "image", "navigation", "search",
             "region", "columnheader", "DisclosureTriangle", "RootWebArea"}  # fmt: skip
    assert [(role, name) for role, name in roles if role in named and not name.strip()] == []
    assert {"banner", "main", "contentinfo", "navigation", "search", "slider", "status"} <= {role for role, _ in roles}
    assert {"Arena", "Throughput", "Tiers", "Slowest commands", "Prompts", "Keys"} <= {
        name for role, name in roles if role == "region"
    }
    assert browser.run("return document.documentElement.lang") == "en"
    levels = browser.run("return [...document.querySelectorAll('h1, h2, h3')].map((head) => Number(head.tagName[1]))")
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


def test_the_map_is_also_a_table(browser: Browser) -> None:
    browser.find("#map-table summary").click()
    rows = browser.until(lambda: browser.find_all("#map-table tbody tr"))
    assert len(rows) == 16
    assert "prompt chunk" in browser.text("#map-table tbody")


def test_what_is_read_out_by_itself_is_not_chatty(browser: Browser) -> None:
    browser.run(COUNT_WHAT_IS_SAID)
    polled(browser, 3)
    assert browser.run("return window.said") == 0
    browser.find("input[name=prefix]").send_keys("session:1", Keys.ENTER)
    browser.until(lambda: browser.text("#live") == "11 keys beginning with session:1")


# ---- to the eye ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out_from_its_ground(browser: Browser, served: Served, scheme: str) -> None:
    browser.prefer(color_scheme=scheme)
    block = chunk(served)
    assert isinstance(block["offset"], int)
    browser.click_at("#map", *map_point(browser, block["offset"]))
    browser.until(lambda: browser.facts("#here"))
    browser.find("#results tbody button").click()
    polled(browser, 2)
    browser.run(SHOW_ALARMS)
    contrasts = browser.contrasts()
    assert len(contrasts) > 150
    assert [(text, round(ratio, 2)) for text, ratio in contrasts if ratio < 4.5] == []
    browser.run("for (const alarm of document.querySelectorAll('.alarm')) alarm.hidden = true")
    browser.picture(f"page-{scheme}")


def test_the_two_schemes_are_light_and_dark(browser: Browser) -> None:
    grounds = []
    for scheme in ("light", "dark"):
        browser.prefer(color_scheme=scheme)
        red = browser.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]")
        grounds.append((int(red), browser.run(PIXELS)))
    assert grounds[0][0] > 230
    assert grounds[1][0] < 40
    browser.until(lambda: browser.run(PIXELS) != grounds[0][1])


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_narrow_screen_needs_no_scrolling_to_the_side(browser: Browser, width: int) -> None:
    browser.resize(width, 900)
    browser.until(lambda: browser.run("return document.querySelector('#map canvas').clientWidth") < width)
    assert browser.run("return document.documentElement.scrollWidth") <= width
    if width == 390:
        browser.picture("page-narrow")


def test_a_reader_who_wants_less_motion_gets_none(browser: Browser) -> None:
    browser.prefer(reduced_motion="reduce")
    browser.run("Element.prototype.scrollIntoView = function (how) { window.how = how.behavior; }")
    browser.run("arguments[0].click()", browser.find("#prompts tbody button"))
    assert browser.run("return window.how") == "auto"
    assert browser.run("return document.getAnimations().length") == 0
