"""What several tests of the page do and wait for."""

from tests.browser.chromium import Browser
from tests.browser.served import Served

POINTS = "return points.length"
ASK = "askArena()"
"""Has the page ask for its map at once, and not four seconds after the last time."""
PIXELS = "return document.querySelector('#map canvas').toDataURL()"


def polled(browser: Browser, times: int) -> None:
    """Wait until the page has asked so many times more."""
    before = browser.run(POINTS)
    browser.until(lambda: browser.run(POINTS) >= before + times)


def chunk(served: Served) -> dict[str, object]:
    """What the server says of one of the engine's blocks that lies in memory."""
    blocks = served.told("api/keys?prefix=kvredis%3A")["keys"]
    return next(block for block in blocks if block["tier"] == "memory")


def captioned(browser: Browser, text: str) -> bool:
    """Whether the list of found keys says so."""
    return text in browser.text("#results caption")


def map_point(browser: Browser, offset: int) -> tuple[float, float]:
    """Where on the map a place in the arena is drawn."""
    at = browser.run(
        "const cell = Math.floor(arguments[0] / map.cell_bytes) + 1, { columns, width, height } = layout;"
        "return [(cell % columns + 0.5) * width, (Math.floor(cell / columns) + 0.5) * height]",  # wholly the block's
        offset,
    )
    return float(at[0]), float(at[1])
