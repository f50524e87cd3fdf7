"""Debian's Chromium without a screen, and what tests ask of it: sizes, colour schemes, pictures, contrast, roles."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

T = TypeVar("T")
LIMIT_S = 30
OUTPUT_VARIABLE = "KVREDIS_TEST_OUTPUT"
"""Names a folder that pictures are copied to."""

NOWHERE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE localhost"
"""Nothing that a test opens may fetch anything from elsewhere."""

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


def program(name: str) -> str:
    """Where a program is; without it the test is skipped, but not where CI is set."""
    found = shutil.which(name)
    if found is None:
        assert not os.environ.get("CI"), f"{name} is not here, and CI is set"
        pytest.skip(f"{name} is not installed (apt install chromium chromium-driver)")
    return found


class Browser:
    """One window."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        options = ChromeOptions()
        options.binary_location = program("chromium")
        for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars"):
            options.add_argument(flag)
        options.add_argument(NOWHERE)
        options.add_argument(f"--user-data-dir={folder / 'profile'}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.driver = Chrome(options=options, service=Service(program("chromedriver")))
        self.driver.set_page_load_timeout(LIMIT_S)
        self.driver.set_script_timeout(LIMIT_S)
        self.resize(1280, 900)

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
        """Open a page and wait until it shows what it has been told."""
        self.driver.get(url)
        self.until(lambda: self.text("#status") == "Live" and self.run("return map !== null"))
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
        names, values = self.texts(f"{root} .facts dt"), self.texts(f"{root} .facts dd")
        return dict(zip(names, values, strict=True))

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

    def close(self) -> None:
        """End it."""
        self.driver.quit()
