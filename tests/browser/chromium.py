"""Debian's Chromium without a screen, and what tests ask of it: sizes, colour schemes, pictures, contrast, roles."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium.common.exceptions import WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.command import Command
from selenium.webdriver.remote.remote_connection import RemoteConnection
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait
from urllib3.exceptions import HTTPError

T = TypeVar("T")
LIMIT_S = 60
COMMAND_S = LIMIT_S + 15
"""A driver that has not answered by then hangs: it ends whatever else takes long by itself after LIMIT_S."""

QUIT_S = 10
OUTPUT_VARIABLE = "KVREDIS_TEST_OUTPUT"
"""Names a folder that pictures are copied to."""

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost",  # nothing may be fetched from elsewhere
    "--disable-renderer-backgrounding",  # a hidden window is drawn all the same
    "--disable-backgrounding-occluded-windows",
    "--disable-background-timer-throttling",
)

CONTRASTS = """
function parts(colour) { return colour.match(/[\\d.]+/g).map(Number); }
function light(colour) {
  const [r, g, b] = parts(colour).map((n) => n / 255 <= 0.04045 ? n / 3294.6 : ((n / 255 + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function ground(node) {
  for (let each = node; each; each = each.parentElement) {
    const colour = getComputedStyle(each).backgroundColor, alpha = parts(colour)[3];
    if (alpha === undefined || alpha === 1) return colour;
    if (alpha > 0) return null;
  }
  return getComputedStyle(document.body).backgroundColor;
}
const seen = [];
for (const node of document.querySelectorAll("body *")) {
  const text = [...node.childNodes].filter((child) => child.nodeType === 3).map((child) => child.data).join("").trim();
  const box = node.getBoundingClientRect(), style = getComputedStyle(node);
  if (!text || !box.width || !box.height || style.visibility !== "visible" || node.tagName === "SCRIPT") continue;
  const own = node instanceof SVGElement ? style.fill : style.color, under = ground(node);
  const [high, low] = [light(own), light(under)].sort((a, b) => b - a);
  seen.push([text.slice(0, 40), (high + 0.05) / (low + 0.05)]);
}
return seen;
"""
"""For each piece of text that is to be seen, the ratio of WCAG 2's "contrast ratio", from computed styles."""


SEARCHED = "return results.caption.textContent !== ''"
FACTS = """
const names = [...document.querySelectorAll(`${arguments[0]} .facts dt`)];
return names.map((name) => [name.textContent, name.nextElementSibling.textContent]);
"""


def program(name: str) -> str:
    """Where a program is; without it the test is skipped, but not where CI is set."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is not here, and CI is set"
        pytest.skip(f"{name} is not installed (apt install chromium chromium-driver)")
    return found


def connection(driver: Chrome) -> RemoteConnection:
    """What carries commands to the driver's process."""
    assert isinstance(driver.command_executor, RemoteConnection)
    return driver.command_executor


def started(folder: Path) -> Chrome:
    """A driver and its browser, with a profile of their own below `folder`, in a group of processes of their own."""
    options = ChromeOptions()
    options.binary_location = program("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={tempfile.mkdtemp(prefix='profile', dir=folder)}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = Service(program("chromedriver"), popen_kw={"start_new_session": True})
    driver = Chrome(options=options, service=service)
    connection(driver).client_config.timeout = COMMAND_S
    driver.set_page_load_timeout(LIMIT_S)
    driver.set_script_timeout(LIMIT_S)
    return driver


class Browser:
    """One window. `folder` is where pictures go."""

    def __init__(self, folder: Path) -> None:
        self.folder = self._profiles = folder
        self.driver = self._started()

    # ---- how it is shown ---------------------------------------------------------------------------------------------

    def resize(self, width: int, height: int) -> None:
        """Have a window of that size, in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, **features: str) -> None:
        """What the user prefers: color_scheme="dark", reduced_motion="reduce"."""
        told = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    def picture(self, name: str) -> Path:
        """Keep a picture of the whole page, and copy it where OUTPUT_VARIABLE says."""
        width, height = self.run("return [innerWidth, document.documentElement.scrollHeight]")
        self.resize(width, height)
        self.run_until("requestAnimationFrame(() => requestAnimationFrame(done))")
        path = self.folder / f"{name}.png"
        assert self.driver.save_screenshot(str(path))
        self.resize(width, 900)
        if OUTPUT_VARIABLE in os.environ:
            output = Path(os.environ[OUTPUT_VARIABLE])
            output.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, output)
        return path

    # ---- what is there -----------------------------------------------------------------------------------------------

    def open(self, url: str) -> None:
        """Open a page and wait until it shows what it has been told: figures, arena and keys."""
        self.driver.get(url)
        self.until(lambda: self.text("#status") == "Live" and self.run("return map !== null") and self.run(SEARCHED))
        self.complaints()

    def run(self, script: str, *args: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *args)

    def run_until(self, script: str) -> Any:
        """What a script in the page gives to `done`."""
        return self.driver.execute_async_script(f"const done = arguments[0]; {script}")

    def find(self, selector: str) -> WebElement:
        """The first element."""
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str) -> list[WebElement]:
        """Every element."""
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        """The text of an element, hidden or not."""
        return str(self.run("return document.querySelector(arguments[0]).textContent", selector))

    def texts(self, selector: str) -> list[str]:
        """Those of all of them."""
        return list(self.run("return [...document.querySelectorAll(arguments[0])].map((n) => n.textContent)", selector))

    def facts(self, root: str) -> dict[str, str]:
        """What is told of the chosen block."""
        return dict(self.run(FACTS, root))  # names and values at once: the block may be chosen just now

    def until(self, condition: Callable[[], T]) -> T:
        """Wait for something to be so."""
        return WebDriverWait(self.driver, LIMIT_S, poll_frequency=0.05).until(lambda _: condition())

    def complaints(self) -> list[str]:
        """What the console has said since the last time."""
        return [entry["message"] for entry in self.driver.get_log("browser")]  # type: ignore[no-untyped-call]

    def contrasts(self) -> list[tuple[str, float]]:
        """See CONTRASTS."""
        return [(text, ratio) for text, ratio in self.run(CONTRASTS)]

    def roles(self) -> list[tuple[str, str]]:
        """Role and name of all that assistive technology is shown."""
        tree = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})
        nodes = [node for node in tree["nodes"] if not node["ignored"]]
        return [(str(node["role"]["value"]), str(node.get("name", {}).get("value", ""))) for node in nodes]

    # ---- hands -------------------------------------------------------------------------------------------------------

    def press(self, *keys: str) -> None:
        """Press keys, one after the other."""
        for key in keys:
            ActionChains(self.driver).send_keys(key).perform()

    def click_at(self, selector: str, x: float, y: float) -> None:
        """Click inside an element, that far from its upper left corner."""
        element = self.find(selector)
        self.run("arguments[0].scrollIntoView({ block: 'center' })", element)
        size = element.rect
        chain = ActionChains(self.driver)
        chain.move_to_element_with_offset(element, int(x - size["width"] / 2), int(y - size["height"] / 2))
        chain.click().perform()

    # ---- beginning and end -------------------------------------------------------------------------------------------

    def _started(self) -> Chrome:
        try:
            return started(self._profiles)
        except (WebDriverException, HTTPError):  # no free port, or too slow on a busy machine
            return started(self._profiles)

    def leave(self) -> None:
        """Show nothing any more. A browser that cannot even do that is replaced: only one test is the worse for it."""
        try:
            self.driver.get("about:blank")
        except (WebDriverException, HTTPError):
            self._kill()
            self.driver = self._started()

    def close(self) -> None:
        """End it: as it wishes if it still answers, and by force what is there then."""
        connection(self.driver).client_config.timeout = QUIT_S
        with suppress(WebDriverException, HTTPError):
            self.driver.execute(Command.QUIT)
        self._kill()

    def _kill(self) -> None:
        process = self.driver.service.process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(LIMIT_S)
        connection(self.driver).close()  # type: ignore[no-untyped-call]
        self.driver.service.stop()  # sees that it has ended, and closes its pipes
