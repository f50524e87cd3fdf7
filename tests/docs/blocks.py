"""The code blocks of README and documentation, as the tests take them out of the Markdown.

A block that cannot run here says so in the source, in a comment in front of it: `<!-- not run: needs a GPU -->`. A
Python block may need things that a reader has and the test must make: `<!-- given: tokens = [...] -->`. A block whose
fence says `title="lmcache.yaml"` is a file, which the blocks behind it find.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "bench" / "results" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
LANGUAGES = {"sh", "console", "python", "yaml", "json", "text", "promql", "ini"}
RUN = {"sh", "console", "python"}

_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w+-]*)(?P<attributes>.*)$")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->", re.DOTALL)
_GIVEN = re.compile(r"<!-- given:\s*\n?(.*?)\s*-->", re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(kvredis [^`]+)`(?!`)")


@dataclass(frozen=True)
class Block:
    """One fenced block. `reason`: why it is not run, "" when it is; `given` goes before Python."""

    page: Path
    line: int
    language: str
    text: str
    title: str = ""
    reason: str = ""
    given: str = ""

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether the tests run it."""
        return self.language in RUN and not self.reason


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    return list(_blocks(page, page.read_text(encoding="utf-8").splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    at, before = 0, 0  # where we are, and where the text before the next block begins
    while at < len(lines):
        opening = _FENCE.match(lines[at])
        if opening is None:
            at += 1
            continue
        indent, closing = opening["indent"], opening["indent"] + opening["ticks"]
        end = next((n for n in range(at + 1, len(lines)) if lines[n].rstrip() == closing), None)
        assert end is not None, f"{page}:{at + 1}: the block is never closed"
        body = [line.removeprefix(indent) for line in lines[at + 1 : end]]
        comment = _comment_before(lines[before:at])
        title = re.search(r'title="([^"]+)"', opening["attributes"])
        reason, given = _NOT_RUN.search(comment), _GIVEN.search(comment)
        yield Block(
            page,
            at + 1,
            opening["language"],
            "\n".join(body) + "\n",
            title[1] if title else "",
            " ".join(reason[1].split()) if reason else "",
            given[1] if given else "",
        )
        at = before = end + 1


def _comment_before(lines: list[str]) -> str:
    """The comment that ends right before a block, "" if there is other text between."""
    text = "\n".join(lines).rstrip()
    return text[text.rindex("<!--") :] if text.endswith("-->") else ""


def prose_of(page: Path) -> list[tuple[int, str]]:
    """The lines of a page outside of its blocks and comments, with their numbers from 1."""
    text = page.read_text(encoding="utf-8")
    hidden = set()
    for comment in re.finditer(r"<!--.*?-->", text, re.DOTALL):
        first = text.count("\n", 0, comment.start())
        hidden |= set(range(first, first + comment[0].count("\n") + 1))
    for block in blocks_of(page):
        hidden |= set(range(block.line - 1, block.line + block.text.count("\n") + 1))
    return [(n + 1, line) for n, line in enumerate(text.splitlines()) if n not in hidden]


def inline_commands(page: Path) -> list[tuple[int, str]]:
    """Commands of ours within sentences: (line, command). What begins a row of a table is a name, or what is said."""
    lines = [(number, re.sub(r"^\| `[^`]*`", "", line)) for number, line in prose_of(page)]
    text = "\n".join(line for _, line in lines)
    return [
        (lines[text.count("\n", 0, found.start())][0], " ".join(found[1].split())) for found in _INLINE.finditer(text)
    ]


def commands_of(block: Block) -> list[str]:
    """The command lines of a shell block: continued lines joined; of a console block what follows the prompt."""
    if block.language == "console":
        return [command for command, _ in exchanges(block)]
    return [line.strip() for line in re.sub(r"\\\n\s*", " ", block.text).splitlines() if line.strip()]


def exchanges(block: Block) -> list[tuple[str, str]]:
    """What is typed in a console block and what is then printed; `> ` continues a command, as in a shell."""
    found: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            found.append((line[2:], []))
        elif line.startswith("> ") and found and not found[-1][1]:
            found[-1] = (f"{found[-1][0]}\n{line[2:]}", [])
        else:
            assert found, f"{block.place}: a console block begins with `$ `"
            found[-1][1].append(line)
    return [(command, "\n".join(lines)) for command, lines in found]
