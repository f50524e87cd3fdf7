"""What the documents say of the tree is there, and they and the code are written in the words that CONTRIBUTING asks
for."""

import re
from pathlib import Path

import pytest

from kvredis.server.commands.connection import REDIS_VERSION
from tests.docs.blocks import PAGES, ROOT

TOURS = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
ROOMS = ("storage", "backends", "kvredis", "cli", "bench", "tests", "docs", "deploy", "scripts")
ACTORLESS = re.compile(r"\b(nobody|somebody|whoever|anybody|behind (its|their|his) backs?)\b", re.IGNORECASE)
QUOTES = re.compile(r"`[^`]*`")
DATA = re.compile(r'(?<!")"(?!")[^"\n]*"')
"""A string of one line in code: tests name users and hosts as they like."""
_PATH = re.compile(rf"`((?:{'|'.join(ROOMS)})/[\w./-]*)(?:::(\w+))?`")


def test_no_document_leaves_out_who_acts() -> None:
    drawings = sorted((ROOT / "docs" / "drawings").glob("*.svg"))
    found = [
        f"{page.relative_to(ROOT)}:{number}: {line.strip()}"
        for page in [*PAGES, *TOURS, ROOT / "CHANGELOG.md", *drawings]
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        if ACTORLESS.search(QUOTES.sub("", line))  # what the program says is its own affair
    ]
    assert found == []


def test_no_code_and_no_test_leaves_out_who_acts() -> None:
    found = []
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*")):
        if path.suffix in (".py", ".c", ".html", ".sh") and path.name != "test_words.py":
            text = path.read_text(encoding="utf-8").replace("_", " ")
            found += [
                f"{path.relative_to(ROOT)}: {line.strip()}"
                for line in text.splitlines()
                if ACTORLESS.search(DATA.sub("", line) if path.is_relative_to(ROOT / "tests") else line)
            ]
    assert found == []


def test_documents_compare_with_the_version_of_redis_that_hello_and_info_name() -> None:
    version = ".".join(REDIS_VERSION.split(".")[:2])
    pages = [ROOT / "README.md", ROOT / "docs" / "redis.md", ROOT / "docs" / "index.md"]
    named = {
        page: re.findall(r"(?:as|of|Of|letter of) Redis (\d+\.\d+)", page.read_text(encoding="utf-8")) for page in pages
    }
    assert all(named.values())
    assert {each for found in named.values() for each in found} == {version}


def test_no_text_installs_from_a_package_index_that_has_no_kvredis_yet() -> None:
    by_name = re.compile(r"\b(pip3?|uv|pipx)\b[^`'\n]*\binstall\b[^`\n]*[ '\"]kvredis(\[|\b(?![-./]))")
    places = [*PAGES, *TOURS, *(ROOT / "deploy").rglob("*"), *(ROOT / "cli").rglob("*.py")]
    texts = {place: place.read_text(encoding="utf-8", errors="replace") for place in places if place.is_file()}
    assert [place for place, text in texts.items() if by_name.search(text)] == []
    assert by_name.search("pip install 'kvredis[engine]'")
    assert not by_name.search("/opt/kvredis/bin/pip install .")


@pytest.mark.parametrize("page", TOURS, ids=lambda page: page.name)
def test_every_path_that_a_tour_of_the_code_names_is_there(page: Path) -> None:
    named = _PATH.findall(page.read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path, _ in named if not (ROOT / path).exists()] == []


def test_every_promise_names_a_test_that_there_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("\n## Promises\n")[2].partition("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 10
    for row in rows:
        tests = _PATH.findall(row)
        assert tests, row
        for path, name in tests:
            assert name, f"{path}: which test?"
            assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"


def test_what_leaves_out_who_acts_is_found() -> None:
    assert ACTORLESS.search("Somebody reads it")
    assert ACTORLESS.search("sent behind their backs")
    assert not ACTORLESS.search("The server sends it in the background")
