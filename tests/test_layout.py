"""The shape of the house, read from the source: who may import whom, where the rooms stand, and how long a file is."""

import ast
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = {"storage": 1, "backends": 2, "server": 3, "adapters": 3, "bench": 4, "cli": 5}
LINKED_ROOMS = ("storage", "backends", "bench", "cli")
DOOR_NAMES = {"CacheEngine": "adapters", "ChunkLayout": "adapters", "Config": "backends"}
LINES_MAX = 800
FUNCTION_LINES_MAX = 75
LONGER_FUNCTIONS = {("kvredis/server/session.py", "buffer_updated")}  # the hot path, where each call costs

# Loaded at module level only where they are the point.
HEAVY = {
    "torch": {"adapters"},
    "transformers": {"adapters"},
    "safetensors": {"adapters"},
    "tokenizers": {"adapters"},
    "vllm": {"adapters"},
    "sglang": {"adapters"},
    "numpy": {"adapters", "bench"},
}
FOREIGN_TO_STORAGE = {"socket", "asyncio", "selectors", "uvloop", "yaml", "click", "redis", "hiredis"}


def room_folder(room: str) -> Path:
    """Give the real folder of a room."""
    return ROOT / room if room in LINKED_ROOMS else ROOT / "kvredis" / room


def sources(room: str) -> list[Path]:
    """List a room's modules."""
    return sorted(room_folder(room).glob("**/*.py"))


SOURCES = [(room, path) for room in FLOORS for path in sources(room)]
ALL_FILES = [
    *(path for _, path in SOURCES),
    *sorted((ROOT / "tests").glob("**/*.py")),
    *sorted((ROOT / "scripts").glob("*.py")),
]
SHELL_SCRIPTS = [path for path in (*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run") if not path.suffix]


def imports(tree: ast.AST, top_only: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (module, name) of each absolute import; `top_only` leaves out what runs later or only for type checkers."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.module or "", alias.name) for alias in node.names)
        elif top_only and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)):
            continue
        else:
            yield from imports(node, top_only)


def is_type_checking(node: ast.AST) -> bool:
    """Say whether a node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imported_room(module: str, name: str) -> str | None:
    """Give the room of kvredis that an import reaches into, None for everything else."""
    parts = module.split(".")
    if parts[0] != "kvredis":
        return None
    if len(parts) > 1:
        return parts[1]
    return DOOR_NAMES.get(name, name if name in FLOORS else None)


def parse(path: Path) -> ast.Module:
    """Parse a file."""
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def wrong_imports(room: str, tree: ast.Module, folder: str = "") -> list[str]:
    """List the imports of a module of `room`, or of a `folder` in it, that the floors forbid."""
    wrong = []
    for module, name in imports(tree):
        target = imported_room(module, name)
        if module.split(".")[0] in LINKED_ROOMS:
            wrong.append(f"{module}: a bare room name would be a second copy of its classes")
        elif target == room:
            if not folder or module.startswith(f"kvredis.{room}.{folder}."):
                wrong.append(f"{module}: inside a room import .module")
        elif target is not None and FLOORS.get(target, 99) >= FLOORS[room]:
            wrong.append(f"{module} {name}: {room} (floor {FLOORS[room]}) may not import {target}")
    return wrong


@pytest.mark.parametrize(("room", "path"), SOURCES, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_imports_run_downstairs(room: str, path: Path) -> None:
    inside = path.relative_to(room_folder(room)).parts
    assert wrong_imports(room, parse(path), inside[0] if len(inside) > 1 else "") == []


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("storage", "import storage.arena"),
        ("cli", "from backends.config import Config"),
        ("storage", "from kvredis.backends.config import Config"),
        ("server", "from kvredis.adapters.engine import CacheEngine"),
        ("adapters", "import kvredis.server.server"),
        ("backends", "from kvredis import CacheEngine"),
        ("storage", "def later():\n    from kvredis.cli import main"),
        ("storage", "from kvredis.storage.arena import Arena"),
        ("bench", "from kvredis import cli"),
    ],
)
def test_the_rule_catches_a_wrong_import(room: str, line: str) -> None:
    assert len(wrong_imports(room, ast.parse(line))) == 1


def test_a_folder_of_a_room_imports_the_rooms_files_in_full_and_its_own_by_a_dot() -> None:
    assert wrong_imports("server", ast.parse("from kvredis.server.commands import command"), "families") == []
    assert len(wrong_imports("server", ast.parse("from kvredis.server.families.keys import ttl"), "families")) == 1


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("bench", "from kvredis import CacheEngine"),
        ("cli", "from kvredis import __version__"),
        ("backends", "from kvredis.storage.store import Store"),
        ("storage", "from .arena import Arena"),
        ("storage", "import mmap, os.path"),
    ],
)
def test_the_rule_lets_a_right_import_pass(room: str, line: str) -> None:
    assert wrong_imports(room, ast.parse(line)) == []


@pytest.mark.parametrize(("room", "path"), SOURCES, ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_heavy_packages_are_loaded_at_module_level_only_by_adapters(room: str, path: Path) -> None:
    if room == "cli" and path.name.startswith("demo"):
        return  # the demo is such a package's user, and only `kvredis demo` loads it
    loaded = {module.split(".")[0] for module, _ in imports(parse(path), top_only=True)}
    assert {name for name in loaded & HEAVY.keys() if room not in HEAVY[name]} == set()


@pytest.mark.parametrize("path", sources("storage"), ids=lambda path: path.name)
def test_the_store_knows_no_sockets_event_loop_or_yaml(path: Path) -> None:
    assert {module.split(".")[0] for module, _ in imports(parse(path))} & FOREIGN_TO_STORAGE == set()


def test_tests_and_scripts_import_no_bare_rooms() -> None:
    bare = [
        (path.name, module)
        for path in ALL_FILES
        for module, _ in imports(parse(path))
        if module.split(".")[0] in LINKED_ROOMS
    ]
    assert bare == []


@pytest.mark.parametrize("room", LINKED_ROOMS)
def test_a_room_at_the_root_is_linked_into_the_package(room: str) -> None:
    link = ROOT / "kvredis" / room
    assert link.is_symlink()
    assert os.readlink(link) == f"../{room}"
    assert (link / "__init__.py").is_file()


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path).removeprefix(f"{ROOT}/"))
def test_a_file_says_why_it_exists_and_fits_in_the_head(path: Path) -> None:
    assert ast.get_docstring(parse(path)), "a file opens with why it exists"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= LINES_MAX


def long_functions(path: Path) -> set[tuple[str, str]]:
    """Give (file, name) of each function that is longer than it should be."""
    return {
        (path.relative_to(ROOT).as_posix(), node.name)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    }


@pytest.mark.parametrize("path", ALL_FILES, ids=lambda path: str(path).removeprefix(f"{ROOT}/"))
def test_a_function_fits_in_the_head(path: Path) -> None:
    assert long_functions(path) <= LONGER_FUNCTIONS


def test_every_exception_from_the_length_of_functions_is_needed() -> None:
    assert set().union(*(long_functions(ROOT / name) for name, _ in LONGER_FUNCTIONS)) == LONGER_FUNCTIONS


@pytest.mark.parametrize("path", SHELL_SCRIPTS, ids=lambda path: path.name)
def test_a_shell_script_says_why_it_exists_stops_at_errors_and_can_be_run(path: Path) -> None:
    shebang, why, *rest = path.read_text(encoding="utf-8").splitlines()
    assert shebang == "#!/usr/bin/env bash"
    assert why.startswith("# ")
    assert any(line in ("set -euo pipefail", "set -uo pipefail") for line in rest)
    assert os.access(path, os.X_OK)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


def test_the_rooms_are_all_there_are() -> None:
    folders = {path.name for path in (ROOT / "kvredis").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == FLOORS.keys()
