"""The documentation site builds without a warning, and what is built is whole: links, anchors, pictures, references.

It is built once for all tests here, by the script that CI and people use.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import click
import pytest

from kvredis.backends.config.schema import KEYS
from kvredis.cli.main import main
from kvredis.server.commands import load_families
from kvredis.server.commands.registry import every_command
from kvredis.server.config.settings import SETTINGS
from kvredis.server.metrics.metrics import FIGURES
from tests.docs.blocks import PAGES, ROOT

BUILD_S = 300
"""A bound; it takes 15 s on an idle core, most of it drawing."""


@dataclass
class Page(HTMLParser):
    """What the tests ask of one built page."""

    path: Path
    links: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)
    pictures: list[dict[str, str]] = field(default_factory=list)
    description: str = ""
    language: str = ""
    titles: int = 0

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.anchors |= {found[name] for name in ("id", "name") if name in found}
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        elif tag == "link" and found.get("rel") not in ("canonical", "prev", "next"):
            self.loaded.append(found.get("href", ""))
        elif tag == "meta" and found.get("name") == "description":
            self.description = found.get("content", "")
        elif tag == "html":
            self.language = found.get("lang", "")
        elif tag == "h1":
            self.titles += 1
        elif tag in ("img", "svg"):
            self.pictures.append(found | {"tag": tag})
        self.loaded += [found[name] for name in ("src", "srcset", "poster", "data") if found.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site; the build fails on any warning."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [ROOT / "scripts" / "docs", str(folder)], capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    """Every built page by its file."""
    return {path: Page(path) for path in site.rglob("*.html")}


def reference(pages: dict[Path, Page], name: str) -> Page:
    return next(page for path, page in pages.items() if path.name == f"{name}.html")


@pytest.mark.nightly
def test_every_page_of_the_docs_is_built_and_says_what_it_is(pages: dict[Path, Page]) -> None:
    written = {page.stem for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert written <= {path.stem for path in pages}
    told = {path.name: page.description for path, page in pages.items() if path.name != "404.html"}
    assert [name for name, text in told.items() if len(text) < 20] == []
    assert len(set(told.values())) == len(told)
    assert [path.name for path, page in pages.items() if page.language != "en"] == []
    assert [path.name for path, page in pages.items() if page.titles != 1] == []


@pytest.mark.nightly
def test_every_link_and_anchor_within_the_site_leads_somewhere(site: Path, pages: dict[Path, Page]) -> None:
    broken = []
    for path, page in pages.items():
        if path.name == "404.html":  # served for any path, so its links are from the root
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else set()
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in anchors):
                broken.append((str(path.relative_to(site)), link))
    assert broken == []


def test_nothing_is_loaded_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    foreign = [(path.name, what) for path, page in pages.items() for what in page.loaded if is_foreign(what)]
    for style in site.rglob("*.css"):
        text = style.read_text(encoding="utf-8")
        foreign += [(style.name, what) for what in re.findall(r"url\(['\"]?([^)'\"]+)", text) if is_foreign(what)]
        foreign += [(style.name, what) for what in re.findall(r"@import\s+([^;]+)", text)]
    assert foreign == []


def test_no_page_has_what_the_theme_would_fetch_a_script_for(site: Path) -> None:
    # Material's own script knows two foreign hosts: one for diagrams of mermaid, one for facts of a repository.
    texts = [path.read_text(encoding="utf-8") for path in site.rglob("*.html")]
    assert not any(re.search(r'class="[^"]*\bmermaid\b|data-md-component="source"', text) for text in texts)


def is_foreign(address: str) -> bool:
    return bool(urlsplit(address).netloc)


@pytest.mark.parametrize("address", ["https://fonts.example/a.css", "//cdn.example/x.js"])
def test_an_address_of_another_host_is_taken_for_one(address: str) -> None:
    assert is_foreign(address)
    assert not is_foreign("../assets/site.css")
    assert not is_foreign("data:image/svg+xml;charset=utf-8,<svg/>")


def test_every_picture_says_in_words_what_it_shows(site: Path, pages: dict[Path, Page]) -> None:
    images = [(path.name, image) for path, page in pages.items() for image in page.pictures if image["tag"] == "img"]
    assert len(images) >= 8  # the plots
    assert [(name, image.get("src")) for name, image in images if len(image.get("alt", "")) < 15] == []
    drawn = [image for page in pages.values() for image in page.pictures if image.get("role") == "img"]
    assert len(drawn) >= 6
    for image in drawn:
        assert len(image["aria-labelledby"].split()) == 2
    for drawing in (ROOT / "docs" / "drawings").glob("*.svg"):
        text = drawing.read_text(encoding="utf-8")
        for label in re.findall(r'aria-labelledby="([^"]+)"', text)[0].split():
            assert re.search(rf'<(title|desc) id="{label}">[^<]{{8,}}</', text), drawing.name
        colours = set(re.findall(r'(?:fill|stroke)="(#[0-9a-f]{6})"', text))
        assert colours <= {"#5b6b73", "#0b7285"}, "the page's style gives the colours, for light and dark"


def test_the_configuration_reference_names_every_key_variable_and_flag(pages: dict[Path, Page]) -> None:
    page = reference(pages, "configuration")
    text = page.path.read_text(encoding="utf-8")
    assert KEYS.keys() <= page.anchors
    assert [key.env for key in KEYS.values() if f"<code>{key.env}</code>" not in text] == []
    assert [key.name for key in KEYS.values() if key.server and key.flag not in text] == []


def test_the_command_reference_names_every_command_and_examples_exist_for_our_own(pages: dict[Path, Page]) -> None:
    load_families()
    anchors, own = reference(pages, "commands").anchors, reference(pages, "own-commands").anchors
    names = {each.name.replace("|", "-").replace(".", "-"): each for each in every_command()}
    assert names.keys() <= anchors
    assert {name for name, each in names.items() if each.group == "kv"} <= own


def test_the_settings_and_metrics_references_name_all_there_are(pages: dict[Path, Page]) -> None:
    settings = reference(pages, "settings").path.read_text(encoding="utf-8")
    assert [name for name in SETTINGS if f"<code>{name}</code>" not in settings] == []
    metrics = reference(pages, "metrics").path.read_text(encoding="utf-8")
    assert [figure.full_name for figure in FIGURES if figure.full_name not in metrics] == []


def test_the_command_line_reference_names_every_command_with_its_options(pages: dict[Path, Page]) -> None:
    page = reference(pages, "cli")
    text = unescape(re.sub(r"<[^>]+>", "", page.path.read_text(encoding="utf-8")))
    found = dict(commands("kvredis", main))
    assert {"kvredis-serve", "kvredis-config-check", "kvredis-doctor-hugepages", "kvredis-bench-plot"} <= found.keys()
    assert found.keys() <= page.anchors
    options = {option for command in found.values() for each in command.params for option in each.opts}
    assert [option for option in sorted(options) if option.startswith("--") and option not in text] == []


def commands(anchor: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Every command of the command line, with the anchor that it has."""
    yield anchor, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            part = command.get_command(context, name)
            if part is not None and not part.hidden:
                yield from commands(f"{anchor}-{name}", part)


def test_the_search_index_knows_every_page(site: Path, pages: dict[Path, Page]) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    found = {entry["location"].partition("#")[0] for entry in index["docs"]}
    assert {str(path.relative_to(site)) for path in pages} - {"404.html", "index.html"} <= found
