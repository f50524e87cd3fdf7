"""The page in a real browser, over a real server: what it shows, how it is worked by mouse, how it takes strangers'
bytes, that it only looks, and what it does when the server is gone."""

import json
import socket
from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver.common.keys import Keys

from tests.browser.chromium import Browser
from tests.browser.looking import ASK, PIXELS, captioned, chunk, map_point, polled
from tests.browser.served import CHUNK_TOKENS, HOSTILE_KEYS, HOSTILE_NAME, PASSWORD, PROMPTS, Served

TIMES = "\N{MULTIPLICATION SIGN}"


# ---- what it shows ---------------------------------------------------------------------------------------------------


def test_the_page_shows_what_the_server_holds(browser: Browser, served: Served) -> None:
    told = served.told("api/state")
    assert browser.driver.title == f"kvredis 127.0.0.1:{served.port}"
    assert f"127.0.0.1:{served.port}" in browser.text("#who")
    memory, disk = told["tiers"]["memory"], told["tiers"]["disk"]
    rows = {row.split("\t")[0]: row.split("\t")[1:] for row in browser.run(
        "return [...document.querySelectorAll('#tiers tbody tr')].map((row) =>"
        " [...row.cells].map((cell) => cell.textContent).join('\\t'))"
    )}  # fmt: skip
    assert rows["Blocks"] == [f"{memory['entries']:,}", f"{disk['entries']:,}"]
    assert rows["Room"] == ["24.0 MiB", "256 MiB"]
    assert rows["Pages"][0] == f"{memory['pages']:,} {TIMES} 4.00 KiB"
    hits = sum(told["hits"].values())
    assert browser.text("#now-hits dd") == f"{100 * hits / (hits + told['misses']):.1f} %"
    assert browser.text("#now-memory .note").endswith("of 24.0 MiB")
    assert "GET" in browser.texts("#timed tbody th")
    assert browser.texts("#flows tbody th")[0] == "TCP"


def test_prompts_are_listed_with_their_tokens_and_can_be_sorted(browser: Browser) -> None:
    tokens = browser.run(
        "return [...document.querySelectorAll('#prompts tbody tr')].map((row) => row.cells)"
        ".filter((cells) => cells[1].textContent === 'prompt chunk').map((cells) => cells[2].textContent)"
    )
    assert sorted(int(each.replace(",", "")) for each in tokens) == [
        CHUNK_TOKENS * (prompt + 2) for prompt in range(PROMPTS)
    ]
    browser.find("#prompts th[data-field=bytes] button").click()
    assert browser.find("#prompts th[data-field=bytes]").get_attribute("aria-sort") == "descending"
    assert browser.find("#prompts th[data-field=hits]").get_attribute("aria-sort") is None
    first = browser.run("return document.querySelector('#prompts tbody tr').cells[2].textContent")
    assert first == str(CHUNK_TOKENS * (PROMPTS + 1))


def test_a_click_on_the_map_lists_what_lies_there_with_its_tensor(browser: Browser, served: Served) -> None:
    block = chunk(served)
    assert isinstance(block["offset"], int)
    browser.click_at("#map", *map_point(browser, block["offset"]))
    facts = browser.until(lambda: browser.facts("#here"))
    assert facts["Key"] == block["key"]
    assert facts["Type"] == "BF16"
    assert facts["Shape"] == f" {TIMES} ".join(["8 layers", "2", f"{CHUNK_TOKENS} tokens", "4 kv heads", "64 head dim"])
    assert facts["Model"] == "Qwen/Qwen2.5-7B"
    assert facts["Tokens"] == str(CHUNK_TOKENS)
    assert "100 % used" in browser.text("#place")
    browser.picture("page-with-a-block")


def test_the_map_can_be_coloured_by_four_things(browser: Browser) -> None:
    drawn = {}
    for name in ("lease", "tier", "kind", "age"):
        browser.run("arguments[0].click()", browser.find(f"#colours input[value={name}]"))
        drawn[name] = (browser.run(PIXELS), tuple(browser.texts("#legend li")))
    assert len(set(drawn.values())) == 4
    assert "prompt chunk" in drawn["kind"][1]
    assert "held by readers" in drawn["lease"][1]
    assert all(legend[-1] == "free" for _, legend in drawn.values())


def test_what_is_held_by_a_reader_is_drawn_so(browser: Browser, served: Served) -> None:
    key = str(chunk(served)["key"])
    assert not browser.run("return map.leased.some((percent) => percent > 0)")
    browser.run("arguments[0].click()", browser.find("#colours input[value=lease]"))
    before = browser.run(PIXELS)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", served.port))
        reader.sendall(f"AUTH {PASSWORD}\r\n".encode() + f"GET {key}\r\n".encode() * 20)  # and takes no answer
        browser.until(lambda: browser.run(f"{ASK}; return map.leased.some((percent) => percent === 100)"))
        assert browser.run(PIXELS) != before
        cell = browser.run("return map.leased.indexOf(100)")
        assert "100 % held by readers" in browser.run("return describe(arguments[0])", cell)
    browser.until(lambda: not browser.run(f"{ASK}; return map.leased.some((percent) => percent > 0)"))


def test_a_search_by_prefix_lists_keys_and_a_key_its_facts(browser: Browser, served: Served) -> None:
    field = browser.find("input[name=prefix]")
    field.send_keys("session:1", Keys.ENTER)
    browser.until(lambda: browser.text("#results caption") == "11 keys beginning with session:1")
    assert sorted(browser.texts("#results tbody button")) == sorted(
        ["session:1", *(f"session:{number}" for number in range(10, 20))]
    )
    button = next(each for each in browser.find_all("#results tbody button") if each.text == "session:19")
    button.click()
    assert browser.facts("#results")["Size"] == "57,100 bytes"
    field.clear()
    field.send_keys("no such key", Keys.ENTER)
    browser.until(lambda: browser.text("#results caption") == "No keys beginning with no such key")
    assert browser.find_all("#results tbody button") == []


def test_choosing_a_prompt_lists_its_chunks(browser: Browser) -> None:
    prompt = next(each for each in browser.find_all("#prompts tbody button") if "Qwen" in each.text)
    prefix = prompt.get_attribute("title")
    browser.run("arguments[0].click()", prompt)
    browser.until(lambda: "beginning with kvredis:" in browser.text("#results caption"))
    assert browser.find("input[name=prefix]").get_attribute("value") == prefix
    keys = browser.run("return [...document.querySelectorAll('#results tbody button')].map((each) => each.title)")
    assert keys
    assert all(key.startswith(prefix) for key in keys)


def test_prompts_that_look_alike_keep_a_row_each(browser: Browser, served: Served) -> None:
    alike = [b"p" * 300 + b"%d:" % number for number in range(2)]
    rows = (
        "return [...document.querySelectorAll('#prompts tbody button')].filter((n) => n.title.startsWith('ppp')).length"
    )
    with served.client() as client:
        for key in alike:
            client.set(key, b"x" * 20_000)
        try:
            browser.until(lambda: browser.run(f"{ASK}; {rows}") == 2)
            browser.run("for (let n = 0; n < 3; n += 1) showPrompts(prompts)")
            assert browser.run(rows) == 2
        finally:
            client.delete(*alike)


# ---- who only looks --------------------------------------------------------------------------------------------------


def test_a_page_that_is_open_and_used_changes_nothing(browser: Browser, served: Served) -> None:
    def traces() -> list[object]:
        with served.client() as client:
            stats = client.info("stats")
            assert isinstance(stats, dict)
            blocks = served.told("api/keys?prefix=kvredis%3A")["keys"]
            hits = [(block["key"], block["hits"], block["leases"]) for block in blocks]
            return [stats["keyspace_hits"], stats["keyspace_misses"], stats["evicted_keys"], hits]

    before = traces()
    block = chunk(served)
    assert isinstance(block["offset"], int)
    browser.click_at("#map", *map_point(browser, block["offset"]))
    browser.until(lambda: browser.facts("#here"))
    polled(browser, 2)
    assert traces() == before


def test_without_the_password_there_is_no_page(browser: Browser, served: Served) -> None:
    browser.driver.get("about:blank")
    browser.driver.execute_cdp_cmd("Network.clearBrowserCache", {})
    browser.driver.get(served.url.replace("secret", "wrong"))
    assert browser.find_all("#map") == []
    browser.complaints()


# ---- strangers' bytes ------------------------------------------------------------------------------------------------


def test_hostile_keys_and_names_are_text(browser: Browser, served: Served) -> None:
    with served.client() as client:
        client.config_set("slowlog-log-slower-than", "0")
        client.client_setname(HOSTILE_NAME.decode())
        for key in HOSTILE_KEYS:
            client.set(key, b"x" * 20_000)
        client.config_set("slowlog-log-slower-than", "1000000")
        try:
            browser.until(lambda: HOSTILE_NAME.decode()[:29] in browser.text("#slow tbody"))
            for prefix in ("<", "\\x00", "long/"):
                field = browser.find("input[name=prefix]")
                field.clear()
                field.send_keys(prefix, Keys.ENTER)
                browser.until(partial(captioned, browser, f"beginning with {prefix}"))
                shown = browser.find_all("#results tbody button")
                assert shown
                shown[-1].click()
                assert browser.facts("#results")["Key"].startswith(prefix)
            assert browser.facts("#results")["Key"].endswith("k… (10,005 bytes)")
            assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
            assert browser.run("return document.scripts.length") == 1
            assert browser.run("return document.querySelectorAll('body img, body iframe, body object').length") == 0
            assert browser.run("return window.hit") is None
        finally:
            client.delete(*HOSTILE_KEYS)
            client.slowlog_reset()


def test_a_script_that_is_not_the_page_s_own_does_not_run(browser: Browser) -> None:
    browser.run("const s = document.createElement('script'); s.textContent = 'window.hit = 1'; document.body.append(s)")
    assert browser.run("return window.hit") is None
    (complaint,) = browser.until(browser.complaints)
    assert "Content Security Policy" in complaint


# ---- without the server ----------------------------------------------------------------------------------------------


def test_the_page_says_that_the_server_is_gone_and_comes_back_by_itself(window: Browser, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    server = Served(tmp_path / "first")
    try:
        window.open(server.url)
        window.run("window.mark = 1")
        server.end()
        window.until(lambda: window.text("#status") == "No answer")
        assert "The server has not answered since" in window.find("#gone").text
        assert window.text("#live") == "The server does not answer."
        window.picture("page-gone")
        server = Served(tmp_path / "first", server.metrics_port)
        with server.client() as client:
            client.set("new", b"x" * 50_000)
        window.until(lambda: window.text("#status") == "Live")
        assert not window.find("#gone").is_displayed()
        assert window.text("#live") == "The server answers again."
        window.until(lambda: window.run("return map.starts.some((n) => n > 0)"))
        assert window.run("return window.mark") == 1
        complaints = window.complaints()
        expected = ("net::ERR_", "status of 503")  # it had gone; it was not ready yet
        assert [each for each in complaints if not any(kind in each for kind in expected)] == []
    finally:
        server.end()


def test_the_pictures_are_kept(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVREDIS_TEST_OUTPUT", str(tmp_path / "kept"))
    path = browser.picture("kept")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert (tmp_path / "kept" / "kept.png").stat().st_size == path.stat().st_size > 20_000
    assert json.dumps(browser.run("return [innerWidth, innerHeight]")) == "[1280, 900]"
