"""The page on troubleshooting against the program: every text that it explains is one that the program says, and
whatever the program warns of by itself is explained there.

Texts are compared by the pieces between their variable parts. Errors that are Redis' own are Redis' to explain.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
ROOMS = ("storage", "backends", "cli", "kvredis/server", "kvredis/adapters")
OWN_REPLIES = (
    "kvredis/server/shm/attach.py",
    "kvredis/server/multipart.py",
    "kvredis/server/net/zerocopy.py",
    "kvredis/server/shm/commands.py",
    "kvredis/server/shm/gpu.py",
    "kvredis/server/multipart.py",
    "kvredis/server/commands/prefetch.py",
    "kvredis/server/commands/persistence.py",
)
"""Where error replies are our own words, but for these."""
REDIS_WORDS = ("Command not allowed inside a transaction", "value is out of range", "timeout is out of range")
SAID = {"warning", "error", "ArenaError", "KVRedisError", "refuse", "_complain"}
"""What is called with a text that an operator then reads; replies are made by a function named `error` too."""
PIECE_CHARS_MIN = 7
_VARIABLE = re.compile(r"%[-.\d]*[a-zA-Z]|\{[^}]*\}|\.\.\.")


def pieces(text: str) -> list[str]:
    """A text's fixed parts, as far as they tell anything."""
    parts = (" ".join(part.split()).strip(" .,:;") for part in _VARIABLE.split(text))
    return [part for part in parts if len(part) >= PIECE_CHARS_MIN]


def literal(node: ast.expr) -> str | None:
    """The text of a literal, `{}` for what is put in; None for anything else."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
        return node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
    if isinstance(node, ast.BinOp):  # "..." + text, b"..." % facts
        return "{}".join(filter(None, (literal(node.left), literal(node.right)))) or None
    return None


@cache
def sources() -> list[tuple[Path, ast.Module]]:
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    return [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in paths]


@cache
def all_texts() -> str:
    """Every text in the program, in one."""
    found = (literal(node) for _, tree in sources() for node in ast.walk(tree) if isinstance(node, ast.expr))
    return " \0 ".join(" ".join(text.split()) for text in found if text)


def said() -> Iterator[tuple[str, str]]:
    """What the program says to who runs it: (place, text)."""
    for path, tree in sources():
        name = str(path.relative_to(ROOT))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and node.args):
                continue
            called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            is_reply = called == "error" and isinstance(node.func, ast.Name)
            text = literal(node.args[0])
            if called not in SAID or text is None or (is_reply and name not in OWN_REPLIES):
                continue
            if pieces(text) and not any(word in text for word in REDIS_WORDS):
                yield f"{name}:{node.lineno}", text


def explained() -> list[tuple[int, str]]:
    """The texts in the first column of the page's tables, with their lines."""
    rows = enumerate(PAGE.read_text(encoding="utf-8").splitlines(), 1)
    return [(number, found[1]) for number, row in rows if (found := re.match(r"\| `([^`]+)` \|", row))]


@pytest.mark.parametrize(("line", "text"), explained())
def test_a_text_that_the_page_explains_is_one_that_the_program_says(line: int, text: str) -> None:
    assert pieces(text)
    assert [piece for piece in pieces(text) if piece not in all_texts()] == []


def test_whatever_the_program_warns_of_by_itself_is_explained() -> None:
    page = " \0 ".join(" ".join(text.split()) for _, text in explained())
    missing = [(place, text) for place, text in said() if not all(piece in page for piece in pieces(text))]
    assert missing == []


def test_the_collector_finds_replies_log_lines_and_refusals() -> None:
    texts = [text for _, text in said()]
    assert any("not attached to the lane" in text for text in texts)
    assert any("is lost" in text for text in texts)
    assert any("another server has it open" in text for text in texts)
    assert len(texts) > 40
