"""Where configuration values come from: a YAML file, the environment, overrides; each value keeps its source.

It knows what a key is and nothing of which keys there are: those are declared in config.py, and handed in here.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvredis.storage.errors import ConfigError

from . import values
from .lmcache_names import FOREIGN_ENV, FOREIGN_KEYS
from .values import Parser

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
OTHER_VARIABLES = frozenset({FILE_VARIABLE, "KVREDIS_EVENT_LOOP"})
"""Read elsewhere and no keys."""
SECTION = "kvredis"


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key as declared in Config: what reads it, and all the names that it goes by."""

    name: str
    default: Any
    parse: Parser
    help: str
    metavar: str
    server: bool  # lives under `kvredis:` in the file and as KVREDIS_* in the environment
    secret: bool  # never shown
    later: bool  # read and checked, without effect so far: a value other than the default gives a warning

    @property
    def env(self) -> str:
        """Return the name of its environment variable."""
        return ("KVREDIS_" if self.server else "LMCACHE_") + self.name.upper()

    @property
    def flag(self) -> str:
        """Return the name of its command-line option."""
        return "--" + self.name.replace("_", "-")

    @property
    def is_flag(self) -> bool:
        """Say whether it is a switch: true or false."""
        return isinstance(self.default, bool)


@dataclass(slots=True)
class Found:
    """What the sources have said so far, later ones over earlier ones, and the lines of warning on the way."""

    keys: Mapping[str, Key]
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    entry_origin: dict[str, str] = dataclasses.field(default_factory=dict)  # of "key.entry", for keys that are mappings
    warnings: list[str] = dataclasses.field(default_factory=list)

    def take(self, key: Key, raw: Any, source: str, entry_sources: Mapping[str, str] | None = None) -> None:
        """Check a raw value and keep it. Raises ConfigError, which never shows a secret."""
        try:
            value = key.parse(raw, key.name, source)
        except ConfigError as error:
            if key.secret:
                raise ConfigError(key.name, "***", source, error.reason) from None
            raise ConfigError(
                error.key, error.value, (entry_sources or {}).get(error.key, source), error.reason
            ) from None
        self.values[key.name], self.origin[key.name] = value, source
        if isinstance(value, dict):
            prefix = f"{key.name}."
            lines = {entry.lower(): line for entry, line in (entry_sources or {}).items()}
            others = {entry: line for entry, line in self.entry_origin.items() if not entry.startswith(prefix)}
            self.entry_origin = others | {prefix + name: lines.get((prefix + name).lower(), source) for name in value}

    def read_env(self, env: Mapping[str, str]) -> None:
        """Take the LMCACHE_* and KVREDIS_* variables."""
        by_env = {key.env: key for key in self.keys.values()}
        for name in sorted(env):
            if not name.startswith(("LMCACHE_", "KVREDIS_")) or name in OTHER_VARIABLES:
                continue
            if key := by_env.get(name):
                self.take(key, values.unquote(env[name]), f"env {name}")
            elif name in FOREIGN_ENV:
                self.warnings.append(f"env {name}: a setting of LMCache without a meaning in kvredis")
            else:
                near = difflib.get_close_matches(name, by_env, n=1)
                self.warnings.append(f"env {name}: unknown" + (f"; did you mean {near[0]}?" if near else ""))

    def read_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Take what the command line says; None is: not given."""
        for name, raw in overrides.items():
            if raw is None:
                continue
            if name not in self.keys:
                raise ConfigError(name, raw, "flag", "unknown key" + nearest(name, self.keys))
            self.take(self.keys[name], raw, self.keys[name].flag)

    def read_file(self, path: Path) -> None:
        """Take a YAML file. Raises ConfigError when it cannot be read."""
        try:
            loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(FILE_VARIABLE, str(path), str(path), f"cannot be read: {error}") from None
        try:
            for name, node, line in self._entries(loader, loader.get_single_node(), path):
                if name == SECTION:
                    for inner, inner_node, inner_line in self._entries(loader, node, path):
                        self._take_from_file(inner, _Place(loader, inner_node, path, inner_line), True)
                else:
                    self._take_from_file(name, _Place(loader, node, path, line), False)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            raise ConfigError(FILE_VARIABLE, str(path), f"{path}:{line}", f"not YAML: {error.problem}") from None
        finally:
            loader.dispose()

    def _entries(
        self, loader: yaml.SafeLoader, node: yaml.Node | None, path: Path
    ) -> Iterator[tuple[str, yaml.Node, int]]:
        """Yield (name, value node, line) of a mapping; an empty document or section has none."""
        if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null"):
            return
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                FILE_VARIABLE, str(path), f"{path}:{node.start_mark.line + 1}", "want a mapping of keys to values"
            )
        loader.flatten_mapping(node)
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            name, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
            if name in seen:
                self.warnings.append(f"{path}:{line}: {name} is given twice; this line wins over line {seen[name]}")
            seen[name] = line
            yield name, value_node, line

    def _take_from_file(self, name: str, place: _Place, in_section: bool) -> None:
        key, source = self.keys.get(name), f"{place.path}:{place.line}"
        if key is not None and key.server == in_section:
            entries: dict[str, str] = {}
            if isinstance(key.default, dict) and isinstance(place.node, yaml.MappingNode):
                for entry, _, line in self._entries(place.loader, place.node, place.path):
                    entries[f"{name}.{entry}"] = f"{place.path}:{line}"
            self.take(key, place.loader.construct_object(place.node, deep=True), source, entries)
        elif key is not None:
            inside, outside = f"belongs under `{SECTION}:`", f"belongs at the top of the file, not under `{SECTION}:`"
            self.warnings.append(f"{source}: {name} {inside if key.server else outside}; ignored here")
        elif name in FOREIGN_KEYS and not in_section:
            self.warnings.append(f"{source}: {name}: a setting of LMCache without a meaning in kvredis")
        else:
            here = {known.name: known for known in self.keys.values() if known.server == in_section}
            self.warnings.append(f"{source}: {name}: unknown key" + (nearest(name, here) or nearest(name, self.keys)))


@dataclass(frozen=True, slots=True)
class _Place:
    """A value in a file that is not yet read."""

    loader: yaml.SafeLoader
    node: yaml.Node
    path: Path
    line: int


def nearest(name: str, known: Mapping[str, Any]) -> str:
    """Name the known key that is spelled most like `name`, if one is."""
    near = difflib.get_close_matches(name.lower(), known, n=1)
    return f"; did you mean {near[0]}?" if near else ""
