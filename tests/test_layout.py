"""The shape of the house, read from the source: who may import whom, where the rooms stand, and how long a file is."""

import ast
import functools
import gc
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = {"storage": 1, "backends": 2, "server": 3, "adapters": 3, "bench": 4, "cli": 5}
LINKED_ROOMS = ("storage", "backends", "bench", "cli")
DOOR_NAMES = {"CacheEngine": "adapters", "ChunkLayout": "adapters", "Config": "backends"}
LINES_MAX = 800
LONGER_SAID = "More than 800 lines: "  # and why
FUNCTION_LINES_MAX = 75
LONGER_FUNCTIONS = {("kvredis/server/client/session.py", "_run")}  # the hot path, where each call costs

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
SCRIPTS = (*sorted((ROOT / "scripts").iterdir()), ROOT / ".ci" / "run")
SHELL_SCRIPTS = [path for path in SCRIPTS if path.is_file() and not path.suffix]


def imports(tree: ast.AST, top_only: bool = False) -> list[tuple[str, str]]:
    """List (module, name) of each absolute import; `top_only` leaves out what runs later or only for type checkers."""
    found = []
    waiting = [tree]
    while waiting:
        for node in ast.iter_child_nodes(waiting.pop()):
            if isinstance(node, ast.Import):
                found += [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                found += [(node.module or "", alias.name) for alias in node.names if node.level == 0]
            elif isinstance(node, ast.expr) or (top_only and is_skipped_at_import(node)):
                continue
            else:
                waiting.append(node)
    return found


def is_skipped_at_import(node: ast.AST) -> bool:
    """Say whether the body of a node does not run when its module is imported."""
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_type_checking(node)


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


def name_of(path: Path) -> str:
    """Give a file's name as seen from the repository's root."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parse(path: Path) -> ast.Module:
    """Parse a file, once."""
    gc.disable()  # trees are all live: collecting while they grow takes twice the time of parsing
    try:
        return ast.parse(path.read_text(encoding="utf-8"), str(path))
    finally:
        gc.enable()


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


def test_imports_run_downstairs() -> None:
    wrong = []
    for room, path in SOURCES:
        folder = ".".join(path.relative_to(room_folder(room)).parts[:-1])
        wrong += [f"{name_of(path)}: {each}" for each in wrong_imports(room, parse(path), folder)]
    assert wrong == []


WRONG_IMPORTS = [
    ("storage", "import storage.arena"),
    ("cli", "from backends.config import Config"),
    ("storage", "from kvredis.backends.config.schema import Config"),
    ("server", "from kvredis.adapters.engine.engine import CacheEngine"),
    ("adapters", "import kvredis.server.server"),
    ("backends", "from kvredis import CacheEngine"),
    ("storage", "def later():\n    from kvredis.cli import main"),
    ("storage", "from kvredis.storage.memory.arena import Arena"),
    ("bench", "from kvredis import cli"),
]
RIGHT_IMPORTS = [
    ("bench", "from kvredis import CacheEngine"),
    ("cli", "from kvredis import __version__"),
    ("backends", "from kvredis.storage.store import Store"),
    ("storage", "from .arena import Arena"),
    ("storage", "import mmap, os.path"),
]


def test_the_rule_catches_wrong_imports_and_lets_right_ones_pass() -> None:
    assert [line for room, line in WRONG_IMPORTS if len(wrong_imports(room, ast.parse(line))) != 1] == []
    assert [line for room, line in RIGHT_IMPORTS if wrong_imports(room, ast.parse(line))] == []


def imported_files(path: Path) -> list[Path]:
    """List the files of its own room that a file imports at any level, also for a type checker and within functions."""
    package = ["kvredis", *path.relative_to(ROOT).with_suffix("").parts[:-1]]
    package = package[1:] if package[1] == "kvredis" else package
    found: list[Path] = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.ImportFrom):
            base = [*package[: len(package) - node.level + 1]] if node.level else []
            base += node.module.split(".") if node.module else []
            folder = ROOT.joinpath("kvredis", *base[1:])
            names = [folder / f"{alias.name}.py" for alias in node.names]
            found += [*names, folder.with_suffix(".py"), *([folder / "__init__.py"] if folder.is_dir() else [])]
    return [each for each in found if each.is_file() and each != path]


def test_no_file_of_the_server_imports_itself_by_way_of_others() -> None:
    files = {path: imported_files(path) for room, path in SOURCES if room == "server" and path.name != "__init__.py"}
    while free := [path for path, needed in files.items() if not any(each in files for each in needed)]:
        for path in free:  # what imports nothing that is left is in no circle
            del files[path]
    assert [name_of(path) for path in files] == []


def test_a_folder_of_a_room_imports_the_rooms_files_in_full_and_its_own_by_a_dot() -> None:
    assert wrong_imports("server", ast.parse("from kvredis.server.commands.registry import command"), "acl") == []
    assert len(wrong_imports("server", ast.parse("from kvredis.server.commands.keys import ttl"), "commands")) == 1


def test_heavy_packages_are_loaded_at_module_level_only_by_adapters() -> None:
    loaded = [
        (name_of(path), name)
        for room, path in SOURCES
        if not (room == "cli" and path.parent.name == "demo")  # a user of them, which only `kvredis demo` loads
        for name in {module.split(".")[0] for module, _ in imports(parse(path), top_only=True)}
        if room not in HEAVY.get(name, {room})
    ]
    assert loaded == []


def test_the_store_knows_no_sockets_event_loop_or_yaml() -> None:
    known = [
        (path.name, module)
        for path in sources("storage")
        for module, _ in imports(parse(path))
        if module.split(".")[0] in FOREIGN_TO_STORAGE
    ]
    assert known == []


def test_tests_and_scripts_import_no_bare_rooms() -> None:
    bare = [
        (path.name, module)
        for path in ALL_FILES
        for module, _ in imports(parse(path))
        if module.split(".")[0] in LINKED_ROOMS
    ]
    assert bare == []


def test_the_rooms_at_the_root_are_linked_into_the_package() -> None:
    for room in LINKED_ROOMS:
        link = ROOT / "kvredis" / room
        assert (link.is_symlink() and os.readlink(link)) == f"../{room}"
        assert (link / "__init__.py").is_file()


def test_a_file_says_why_it_exists_and_fits_in_the_head() -> None:
    assert [name_of(path) for path in ALL_FILES if not ast.get_docstring(parse(path))] == []
    lengths = {name_of(path): len(path.read_text(encoding="utf-8").splitlines()) for path in ALL_FILES}
    longer = {name for name, lines in lengths.items() if lines > LINES_MAX}
    assert {name for name in longer if LONGER_SAID not in (ROOT / name).read_text(encoding="utf-8")[:4000]} == set()


def long_functions(path: Path) -> set[tuple[str, str]]:
    """Give (file, name) of each function that is longer than it should be."""
    return {
        (name_of(path), node.name)
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    }


def test_a_function_fits_in_the_head_or_is_a_named_exception() -> None:
    assert set().union(*(long_functions(path) for path in ALL_FILES)) == LONGER_FUNCTIONS


def test_shell_scripts_say_why_they_exist_stop_at_errors_and_can_be_run() -> None:
    for path in SHELL_SCRIPTS:
        shebang, why, *rest = path.read_text(encoding="utf-8").splitlines()
        assert (shebang, why[:2]) == ("#!/usr/bin/env bash", "# "), path
        assert any(line in ("set -euo pipefail", "set -uo pipefail") for line in rest), path
        assert os.access(path, os.X_OK), path
        assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""


def test_the_rooms_are_all_there_are() -> None:
    folders = {path.name for path in (ROOT / "kvredis").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == FLOORS.keys()
