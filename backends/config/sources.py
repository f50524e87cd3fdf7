"""Where configuration values come from: a YAML file, the environment, overrides; each value keeps its source.

It knows what a key is and nothing of which keys there are: those are declared in schema.py, and handed in here. Nothing
stops at the first mistake: what cannot be used becomes an error in a list and reading goes on, so that a file can be
judged as a whole. Config.load raises the first of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.cuda import LIBRARY_VARIABLE

from . import parsers as values
from .lmcache import BEFORE_V1, BEFORE_V1_PREFIX, EC_PREFIX, FOREIGN_ENV, FOREIGN_KEYS, FORMER_NAMES
from .parsers import Loader, Noted, Parser

FILE_VARIABLE = "LMCACHE_CONFIG_FILE"
OTHER_VARIABLES = frozenset(
    {
        FILE_VARIABLE,
        "KVREDIS_EVENT_LOOP",
        "KVREDIS_NATIVE",
        LIBRARY_VARIABLE,
        "LMCACHE_RESP_USERNAME",
        "LMCACHE_RESP_PASSWORD",
    }
)
"""Read elsewhere and no keys."""
SECTION = "kvredis"
NO_MEANING = "a setting of LMCache without a meaning in kvredis"
_GIVEN_UP = "a setting that LMCache has given up, without a meaning in kvredis"


@dataclass(frozen=True, slots=True)
class Key:
    """One configuration key as declared in Config: what reads it, and all the names that it goes by."""

    name: str
    default: Any
    parse: Parser
    help: str
    metavar: str
    server: bool  # lives under `kvredis:` in the file and as KVREDIS_* in the environment
    engine: bool  # an engine reads it: all at the top of the file, and what shapes a store below
    secret: bool  # never shown
    merged: bool  # a mapping whose entries are laid over those of an earlier source, in place of all of them

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


@dataclass(frozen=True, slots=True)
class Remark:
    """One line of warning: where it is from, which key or variable it is about, and what is odd about it."""

    source: str
    key: str
    text: str
    nearest: str | None = None  # the known name that was probably meant

    def __str__(self) -> str:
        """Return the line."""
        return f"{self.source}: {self.text}" + (f"; did you mean {self.nearest}?" if self.nearest else "")


@dataclass(slots=True)
class Found:
    """What the sources have said so far, later ones over earlier ones, and what was wrong or odd on the way."""

    keys: Mapping[str, Key]
    server: bool = True  # who reads: a server, or an engine, which what is wrong about a server's keys never fails
    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    origin: dict[str, str] = dataclasses.field(default_factory=dict)
    entry_origin: dict[str, str] = dataclasses.field(default_factory=dict)  # of "key.entry", for keys that are mappings
    remarks: list[Remark] = dataclasses.field(default_factory=list)
    errors: list[ConfigError] = dataclasses.field(default_factory=list)  # none of which shows a secret

    def get(self, name: str) -> Any:
        """Return a key's value so far, which is the default where no source has said anything."""
        return self.values.get(name, self.keys[name].default)

    def remark(self, source: str, key: str, text: str, nearest: str | None = None) -> None:
        """Keep a line of warning."""
        self.remarks.append(Remark(source, key, text, nearest))

    def take(self, key: Key, raw: Any, source: str, entry_sources: Mapping[str, str] | None = None) -> None:
        """Check a raw value and keep it, or the error. `entry_sources` says of "key.entry" where it stands."""
        try:
            value = key.parse(raw, key.name, source)
        except ConfigError as error:
            shown = "***" if key.secret else values.shown(error.value)
            place = source if key.secret else (entry_sources or {}).get(error.key, source)
            wrong = ConfigError(key.name if key.secret else error.key, shown, place, error.reason)
            self._refuse(key.name, wrong, is_given=source == key.flag)
            return
        if isinstance(value, Noted):
            self.remark(source, key.name, f"{key.name}: {value.note}")
            value = value.value
        if isinstance(value, dict):
            lines = {entry.lower(): line for entry, line in (entry_sources or {}).items()}
            prefix = f"{key.name}."
            value = self._lay(key, value, source, {e: lines.get((prefix + e).lower(), source) for e in value})
        before = self.origin.get(key.name)
        self.values[key.name] = value
        self.origin[key.name] = f"{before}, {source}" if key.merged and before else source

    def _refuse(self, name: str, error: ConfigError, *, is_given: bool = False) -> None:
        """Keep an error; of a key that a server alone reads and that this engine was not `given` itself, a remark."""
        key = self.keys.get(name)
        if self.server or key is None or key.engine or is_given:
            self.errors.append(error)
        else:
            text = f"{str(error).removeprefix(f'{error.source}: ')}; a server's setting, which no engine reads"
            self.remark(error.source, name, text)

    def _unknown(self, source: str, name: str, text: str, near: str | None, raw: Any) -> None:
        """Keep a remark about a name that nothing here has, which may be another program's. It is an error where a
        server would be open to all without what was meant: KVREDIS_PASSWORD, KVREDIS_REQUIREPAS, KVREDIS_TLS_KEY."""
        is_guard = near is not None and _GUARD.fullmatch(near.removeprefix("KVREDIS_").lower())
        if self.server and (is_guard or _LIKE_GUARDS.match(name)):
            text = "unknown" if is_guard else "unknown, and looks like one of those that decide who may come in"
            self._misspelt(source, name, text, near, raw)
        else:
            self.remark(source, name, text, near)

    def _misspelt(self, source: str, name: str, text: str, near: str | None, raw: Any) -> None:
        is_secret = any(values.is_secret(each) for each in (name, near or "")) or _LIKE_GUARDS.match(name) is not None
        reason = text + (f"; did you mean {near}?" if near else "")
        self.errors.append(ConfigError(name, "***" if is_secret else values.shown(raw), source, reason))

    def _lay(self, key: Key, value: dict[str, Any], source: str, places: Mapping[str, str]) -> dict[str, Any]:
        """Put the entries of a mapping over the earlier ones, or in their place; say which of them that hides."""
        prefix, earlier = f"{key.name}.", self.values.get(key.name, {})
        if key.merged:
            hidden = [name for name in value if name in earlier and earlier[name] != value[name]]
            if hidden:
                which = ", ".join(f"{name} ({self.entry_origin[prefix + name]})" for name in hidden)
                self.remark(source, key.name, f"{key.name}: wins over {which}; earlier entries of other names stay")
            value = earlier | value
        else:
            for name in earlier:
                del self.entry_origin[prefix + name]
        self.entry_origin |= {prefix + name: place for name, place in places.items()}
        return value

    # -- the environment and the command line

    def read_env(self, env: Mapping[str, str]) -> None:
        """Take the LMCACHE_* and KVREDIS_* variables."""
        by_env = {key.env: key for key in self.keys.values()}
        ours = ("LMCACHE_", "KVREDIS_", BEFORE_V1_PREFIX)
        of_services = self._service_variables(env)
        for name in sorted(env):
            if not name.startswith(ours) or name in OTHER_VARIABLES or name in of_services:
                continue
            source, bare = f"env {name}", _bare(name)
            if key := by_env.get(name):
                self.take(key, values.unquote(env[name]), source)
            elif bare in FORMER_NAMES:
                successor = FORMER_NAMES[bare]
                if self._former(name, f"LMCACHE_{successor.upper()}", source, env):
                    self.take(self.keys[successor], values.unquote(env[name]), source)
            elif name in FOREIGN_ENV or bare in FOREIGN_KEYS or bare.startswith(EC_PREFIX):
                self.remark(source, name, NO_MEANING)
            elif bare in BEFORE_V1 or name.startswith(BEFORE_V1_PREFIX):
                self.remark(source, name, _GIVEN_UP)
            else:
                self._unknown(source, name, "unknown", nearest_variable(name, by_env), env[name])

    def _service_variables(self, env: Mapping[str, str]) -> frozenset[str]:
        """Return the variables that Kubernetes sets in each pod of a namespace with a Service named like a prefix of
        ours (kvredis, kvredis-metrics, lmcache-server), or `docker run --link` for a container of such a name; one
        remark for all of them.

        They are those of kubelet's envvars.FromServices: PREFIX_SERVICE_HOST, PREFIX_SERVICE_PORT and _PORT_NAME, and
        Docker's links, PREFIX_PORT=tcp://HOST:PORT and PREFIX_PORT_6379_TCP with _PROTO, _PORT, _ADDR, to which Docker
        adds PREFIX_NAME and PREFIX_ENV_*. PREFIX_PORT with a number is what the pod's own specification sets: it stays.
        """
        marks = {found[1]: name for name in sorted(env) if (found := _SERVICE_MARK.fullmatch(name))}
        prefixes = sorted(marks)
        if not prefixes:
            return frozenset()
        named = re.compile(rf"({'|'.join(prefixes)})_({_SERVICE_VARIABLE})")
        linked = re.compile(rf"({'|'.join(_OURS)})(_[A-Z0-9_]+)?_PORT")
        theirs = {name for name in env if named.fullmatch(name)}
        theirs |= {name for name in env if linked.fullmatch(name) and _LINK.fullmatch(env[name].strip())}
        services = ", ".join(prefix.lower().replace("_", "-") for prefix in prefixes)
        is_docker = not any(f"{prefix}_SERVICE_HOST" in env for prefix in prefixes)
        one_of = "Service" if len(prefixes) == 1 else "Services"
        text = (
            f"skipped {len(theirs)} variables of Kubernetes' {one_of} {services} (enableServiceLinks: false ends them)"
        )
        if is_docker:
            text = f"skipped {len(theirs)} variables of Docker's links to {services}"
        self.remark(f"env {marks[prefixes[0]]}", marks[prefixes[0]], text)
        return frozenset(theirs)

    def read_overrides(self, overrides: Mapping[str, Any]) -> None:
        """Take what the command line says; None is: not given."""
        for name, raw in overrides.items():
            if raw is None:
                continue
            if key := self.keys.get(name):
                self.take(key, raw, key.flag)
            else:
                near = nearest(name, self.keys)
                reason = "unknown key" + (f"; did you mean {near}?" if near else "")
                self.errors.append(ConfigError(name, raw, "flag", reason))

    def _former(self, name: str, successor: str, source: str, given: Iterable[str]) -> bool:
        """Say what became of a key's former name; returns whether it is to be taken for the key."""
        known = self.keys.get(successor.removeprefix("LMCACHE_").lower())
        says = f"{name} is LMCache's former name of {successor}"
        if known is None:
            self.remark(source, name, f"{says}: {NO_MEANING}")
        elif successor in given:
            self.remark(source, name, f"{says}, which is given too and wins")
        else:
            self.remark(source, name, f"{says} and is taken for it")
            return True
        return False

    # -- the file

    def read_file(self, path: Path) -> None:
        """Take a YAML file."""
        try:
            text = path.read_text(encoding="utf-8")
            # JSON is YAML but for tabs, which stand in no string of JSON
            loader = Loader(text.replace("\t", " ") if path.suffix == ".json" else text)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            self.errors.append(ConfigError(FILE_VARIABLE, str(path), str(path), f"cannot be read: {why}"))
            return
        try:
            if (node := loader.get_single_node()) is not None:
                self._take_entries(_Place(loader, node, path, 1), in_section=False)
        except _UNREADABLE as error:
            self.errors.append(_not_yaml(error, path, 1))
        finally:
            loader.dispose()

    def _take_entries(self, mapping: _Place, in_section: bool) -> None:
        entries = list(self._entries(mapping, SECTION if in_section else FILE_VARIABLE))
        given = [name for name, _ in entries]
        for name, place in entries:
            try:
                if name == SECTION and not in_section:
                    self._take_entries(place, in_section=True)
                else:
                    self._take_from_file(name, place, given, in_section)
            except _UNREADABLE as error:
                self._refuse(name, self._unreadable(error, name, place))

    def _entries(self, mapping: _Place, named: str) -> Iterator[tuple[str, _Place]]:
        """Yield (name, place of the value) of a mapping, in errors `named` so; of an empty document or section none."""
        loader, node, path = mapping.loader, mapping.node, mapping.path
        if isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:null":
            return
        if not isinstance(node, yaml.MappingNode):
            place = f"{path}:{node.start_mark.line + 1}"
            raw = node.value if isinstance(node, yaml.ScalarNode) and named == SECTION else str(path)
            self.errors.append(ConfigError(named, raw, place, "want a mapping of keys to values"))
            return
        loader.flatten_mapping(node)
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            name, line = str(loader.construct_object(key_node)), key_node.start_mark.line + 1
            if name in seen:
                text = f"{name} is given twice; this line wins over line {seen[name]}"
                self.remark(f"{path}:{line}", name, text)
            seen[name] = line
            yield name, _Place(loader, value_node, path, line)

    def _take_from_file(self, name: str, place: _Place, given: Iterable[str], in_section: bool) -> None:
        key, source = self.keys.get(name), f"{place.path}:{place.line}"
        if key is not None and key.server == in_section:
            self._take_key(key, place)
        elif key is not None:
            inside, outside = f"belongs under `{SECTION}:`", f"belongs at the top of the file, not under `{SECTION}:`"
            raw = place.loader.construct_object(place.node, deep=True)
            shown = "***" if key.secret or values.is_secret(name) else values.shown(raw)
            self._refuse(name, ConfigError(name, shown, source, inside if key.server else outside))
        elif name in FORMER_NAMES and not in_section:
            if self._former(name, FORMER_NAMES[name], source, given):
                self._take_key(self.keys[FORMER_NAMES[name]], place)
        elif (name in FOREIGN_KEYS or name.startswith(EC_PREFIX)) and not in_section:
            self.remark(source, name, f"{name}: {NO_MEANING}")
        elif name in BEFORE_V1 and not in_section:
            self.remark(source, name, f"{name}: {_GIVEN_UP}")
        else:
            here = {known.name: known for known in self.keys.values() if known.server == in_section}
            near = nearest(name, here) or nearest(name, self.keys)
            raw = place.node.value if isinstance(place.node, yaml.ScalarNode) else "..."
            if in_section:  # which has no keys but ours
                self._misspelt(source, name, f"no key of the section `{SECTION}:`", near, raw)
            else:
                self._unknown(source, name, f"{name}: unknown key", near, raw)

    def _unreadable(self, error: Exception, name: str, place: _Place) -> ConfigError:
        found = _not_yaml(error, place.path, place.line)
        raw = values.shown(place.node.value) if isinstance(place.node, yaml.ScalarNode) else "..."
        secret = values.is_secret(name) or (name in self.keys and self.keys[name].secret)
        return ConfigError(name, "***" if secret else raw, found.source, found.reason)

    def _take_key(self, key: Key, place: _Place) -> None:
        entries: dict[str, str] = {}
        if isinstance(key.default, dict) and isinstance(place.node, yaml.MappingNode):
            entries = {f"{key.name}.{name}": f"{at.path}:{at.line}" for name, at in self._entries(place, key.name)}
        self.take(key, place.loader.construct_object(place.node, deep=True), f"{place.path}:{place.line}", entries)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value in a file that is not yet read."""

    loader: Loader
    node: yaml.Node
    path: Path
    line: int


_UNREADABLE = (yaml.MarkedYAMLError, ValueError, LookupError, AttributeError, RecursionError)
"""What PyYAML raises: its own errors, and Python's: for a date that there is not, `!!bool maybe`, `!!timestamp soon`, a
thousand brackets."""


def _not_yaml(error: Exception, path: Path, line: int) -> ConfigError:
    reason = str(error)
    if isinstance(error, yaml.MarkedYAMLError):
        reason = str(error.problem)
        line = error.problem_mark.line + 1 if error.problem_mark else line
    return ConfigError(FILE_VARIABLE, str(path), f"{path}:{line}", f"not YAML: {reason}")


def _bare(variable: str) -> str:
    """Return the key that a variable of LMCache would be of."""
    return variable.removeprefix("LMCACHE_").lower() if variable.startswith("LMCACHE_") else ""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Name the known one that `name` means elsewhere, or that is spelled most like it, in any case, if one is."""
    by_lower = {each.lower(): each for each in known}
    meant = _ELSEWHERE.get(name.lower().replace("-", "_"))
    if meant in by_lower:
        return by_lower[meant]
    for near in difflib.get_close_matches(name.lower(), by_lower, n=3, cutoff=_ALIKE_PART):
        said = name.lower()
        ratio = difflib.SequenceMatcher(None, near, said).ratio()  # in the order of get_close_matches
        if ratio >= _ALIKE or near in said or said in near or sorted(near) == sorted(said):
            return by_lower[near]
    return None


def nearest_variable(name: str, known: Iterable[str]) -> str | None:
    """Name the known variable that `name` is most like behind its prefix, which all of them share."""
    full = {each.partition("_")[2].lower(): each for each in known}
    near = nearest(name.partition("_")[2], full)
    return full[near] if near else None


_ALIKE, _ALIKE_PART = 0.8, 0.75
"""How alike two names must be; and a name and a part of it, or two of the same letters. Lower bounds make
azure_connection_string of max_connections, chunk_size of cpu_size and redis_service_name of redis_username."""

_ELSEWHERE: Mapping[str, str] = {
    "auth": "requirepass",
    "host": "bind",
    "listen": "bind",
    "log_level": "loglevel",
    "max_clients": "maxclients",
    "max_connections": "maxclients",
    "max_memory": "max_local_cpu_size",
    "maxmemory": "max_local_cpu_size",
    "memory": "max_local_cpu_size",
    "pass": "requirepass",
    "passwd": "requirepass",
    "password": "requirepass",
    "redis_password": "password",
    "redis_username": "username",
    "socket": "unixsocket",
}
"""What a key is called by other servers, or by who has not looked -> its name here."""

_GUARD = re.compile(r"requirepass|aclfile|protected_mode|tls_\w+")
"""Keys that decide who may come in."""
_LIKE_GUARDS = re.compile(r"KVREDIS_\w*(PASS|SECRET|AUTH|CREDENTIAL|ACL|TLS|SSL|CERT)")
"""Variables that can have meant nothing else."""

_OURS = ("KVREDIS", "LMCACHE", BEFORE_V1_PREFIX.rstrip("_"))
_SERVICE_MARK = re.compile(rf"((?:{'|'.join(_OURS)})(?:_[A-Z0-9_]+?)?)_(?:SERVICE_HOST|PORT_\d+_(?:TCP|UDP|SCTP)_ADDR)")
_SERVICE_VARIABLE = r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?|NAME|ENV_\w+"
_LINK = re.compile(r"(tcp|udp|sctp)://\S+:\d+", re.IGNORECASE)
