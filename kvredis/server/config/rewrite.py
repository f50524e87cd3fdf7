"""CONFIG REWRITE: settings into the configuration file, in place, with every comment and unknown line left as it is.

The file is a person's: only the values that are written are replaced, and only lines that are missing are added. YAML
has many spellings of one mapping, so the text that comes out is read again and compared with what it should say before
it takes the file's place; a spelling that this cannot edit is an error and not a damaged file.

A setting with a configuration key (`maxclients`) goes to that key under `kvredis:`, any other (`slowlog-max-len`) under
`kvredis: settings:`, by its name in CONFIG.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kvredis.backends.config.schema import KEYS, SECTION

MORE = "settings"
"""The mapping of settings that have no key of their own."""


class RewriteError(Exception):
    """The file is one that cannot be edited; the text says why."""


def rewrite(path: Path, settings: Mapping[str, str]) -> None:
    """Make the file say `settings`, atomically and with its mode kept. OSError or RewriteError: nothing is changed."""
    target = Path(os.path.realpath(path))  # a link stays one
    text = target.read_bytes().decode("utf-8")  # with its line breaks as they are
    edited = with_settings(text, settings)
    if edited != text:
        _replace(target, edited)


def with_settings(text: str, settings: Mapping[str, str]) -> str:
    """`text` with `settings` in it. RewriteError when it cannot be brought to say just that."""
    wanted = _unshared(_loaded(text))
    for name, value in settings.items():
        place, key = _place(name)
        if name == "maxmemory-policy" and "cache_policy" in wanted:
            place, key = (SECTION, MORE), name  # as a key it would contradict that one, and the server would not start
        bare = _is_number(name, value)
        _into(wanted, place)[key] = int(value) if bare else value
        text = _with_value(text, place, key, value if bare else _quoted(name, value))
    if _loaded(text) != wanted:
        raise RewriteError("the file is written in a way that cannot be edited in place")
    return text


def _place(name: str) -> tuple[tuple[str, ...], str]:
    """The mapping that a setting belongs into, and its key there."""
    key = KEYS.get(name.replace("-", "_"))
    if key is not None and key.server:
        return (SECTION,), key.name
    return (SECTION, MORE), name


def _is_number(name: str, value: str) -> bool:
    """Whether a value can be written bare. A password of digits is no number."""
    return value.isascii() and value.isdigit() and str(int(value)) == value and "pass" not in name


def _quoted(name: str, value: str) -> str:
    """Any other value, in double quotes, as JSON and YAML both write it."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RewriteError(f"the value of {name} is not text") from None
    return json.dumps(value, ensure_ascii=False)


def _unshared(found: Any) -> Any:
    """The same values without an anchor that two of them share: what is written must change one place only."""
    if isinstance(found, dict):
        return {key: _unshared(value) for key, value in found.items()}
    return [_unshared(value) for value in found] if isinstance(found, list) else found


def _loaded(text: str) -> dict[Any, Any]:
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as wrong:
        raise RewriteError(f"the file is not YAML: {wrong}") from wrong
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RewriteError("the file is not a mapping")
    return found


def _into(wanted: dict[Any, Any], place: tuple[str, ...]) -> dict[Any, Any]:
    """The mapping at `place`, made if it is not there."""
    for part in place:
        inner = wanted.get(part)
        if inner is None:
            inner = wanted[part] = {}
        if not isinstance(inner, dict):
            raise RewriteError(f"{part} is not a mapping")
        wanted = inner
    return wanted


def _with_value(text: str, place: tuple[str, ...], key: str, spelled: str) -> str:
    """`text` with `key: spelled` in the mapping at `place`."""
    node = yaml.compose(text, Loader=yaml.SafeLoader)
    if node is None:
        return _with_end(text) + _nested(place, key, spelled, "")
    depth = 0
    while depth < len(place):
        assert isinstance(node, yaml.MappingNode), "_into has seen to it"
        inner = _entry(node, place[depth])
        if inner is None:
            return _with_entry(text, node, place[depth:], key, spelled)
        if isinstance(inner[1], yaml.ScalarNode):  # `kvredis:` with nothing behind it
            return _with_block(text, inner, place[depth + 1 :], key, spelled)
        node = inner[1]
        depth += 1
    assert isinstance(node, yaml.MappingNode)
    found = _entry(node, key)
    if found is None:
        return _with_entry(text, node, (), key, spelled)
    old = found[1]
    end = old.end_mark.index
    if not isinstance(old, yaml.ScalarNode) or old.style in ("|", ">"):
        end = len(text[:end].rstrip())
    gap = "" if text[old.start_mark.index - 1 : old.start_mark.index].isspace() else " "
    return text[: old.start_mark.index] + gap + spelled + text[end:]


def _entry(node: yaml.MappingNode, key: str) -> tuple[yaml.Node, yaml.Node] | None:
    """Key and value of an entry; the last one of that name, which is the one that counts."""
    found = [(name, value) for name, value in node.value if name.value == key]
    return found[-1] if found else None


def _with_entry(text: str, node: yaml.MappingNode, rest: tuple[str, ...], key: str, spelled: str) -> str:
    """`text` with one more entry at the end of a mapping."""
    if node.flow_style:
        at = node.end_mark.index - 1
        head = text[:at].rstrip()
        entry = "".join(f"{part}: {{" for part in rest) + f"{key}: {spelled}" + "}" * len(rest)
        return head + ("" if head.endswith(("{", ",")) else ", ") + entry + text[at:]
    at = text.find("\n", _end(text, node)) + 1
    head = text[:at] if at else text + "\n"
    indent = " " * node.start_mark.column
    return head + _nested(rest, key, spelled, indent) + text[len(head) :]


def _with_block(text: str, entry: tuple[yaml.Node, yaml.Node], rest: tuple[str, ...], key: str, spelled: str) -> str:
    """`text` with a mapping behind a key that has had no value."""
    name, value = entry
    start, end = value.start_mark.index, value.end_mark.index
    text = text[:start] + text[end:]  # `~` or `null`, if it was there
    at = text.find("\n", name.end_mark.index) + 1
    head = text[:at] if at else text + "\n"
    indent = " " * (name.start_mark.column + 2)
    return head + _nested(rest, key, spelled, indent) + text[len(head) :]


def _end(text: str, node: yaml.Node) -> int:
    """Where what a node says ends: its own mark is behind the blank lines and comments that follow a block."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(last, tuple) else last)
    return len(text[: node.end_mark.index].rstrip())


def _nested(place: tuple[str, ...], key: str, spelled: str, indent: str) -> str:
    """The lines of `key: spelled` within the mappings of `place`."""
    lines = ""
    for part in place:
        lines += f"{indent}{part}:\n"
        indent += "  "
    return f"{lines}{indent}{key}: {spelled}\n"


def _with_end(text: str) -> str:
    return text if not text or text.endswith("\n") else text + "\n"


def _replace(path: Path, text: str) -> None:
    """Put a new file in the place of an old one; a reader sees one of the two, whole."""
    mode = path.stat().st_mode & 0o7777
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text.encode("utf-8"))
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
