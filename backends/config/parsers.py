"""How one configuration value is written: parsers that refuse what they do not understand.

LMCache turns a bad value into None and fails later, far from the line at fault. Here each parser takes the raw value (a
string from the environment or a flag, any YAML type from a file), and returns the value in its own type or raises
ConfigError with the key, the value and the source. All of them are total: no other exception leaves them.

What an empty string means is decided by kind: what may be absent (`optional`, a mapping, a password) is not given then;
for a size, a number, a switch or a name out of a list it is an error, since it cannot have been meant.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kvredis.storage.errors import ConfigError
from kvredis.storage.options import GIB, parse_size

from .url import parse_remote, redact


class WrittenInt(int):
    """A number of a YAML file that knows how it was written: a password 012 is not 10, nor is 1_000 one of 1000."""

    written: str


class WrittenFloat(float):
    """The same of one with a point."""

    written: str


class Loader(yaml.SafeLoader):
    """YAML of plain values with a bound on whole numbers: Python refuses to print one of 4300 digits, and errors do."""

    def construct_bounded_int(self, node: yaml.ScalarNode) -> WrittenInt:
        """Read a whole number of at most 128 bits. Raises ValueError for a longer one."""
        number = WrittenInt(self.construct_yaml_int(node))
        if number.bit_length() > 128:
            raise ValueError("a whole number of more than 128 bits")
        number.written = node.value
        return number

    def construct_written_float(self, node: yaml.ScalarNode) -> WrittenFloat:
        """Read a number with a point. Raises ValueError for what is none."""
        number = WrittenFloat(self.construct_yaml_float(node))
        number.written = node.value
        return number


Loader.add_constructor("tag:yaml.org,2002:int", Loader.construct_bounded_int)
Loader.add_constructor("tag:yaml.org,2002:float", Loader.construct_written_float)

# (raw value, key, source) -> value
Parser = Callable[[Any, str, str], Any]

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})
_ABSENT = frozenset({"", "none", "null", "false", "no", "off"})
LOSSY_SERDES = ("cachegen", "kivi")
"""What LMCache calls its encodings that compress with loss."""
FORMER_SERDES = ("torch", "safetensor", "fast")
"""Its encodings without loss that it has given up, and that people's files still name."""
_SECRET = re.compile(r"pass|secret|token\b|access_key|account_key|connection_string|credential", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Noted:
    """A parser's value that could be used, with something about it that the user should be told in one line."""

    value: Any
    note: str


def is_secret(name: str) -> bool:
    """Say whether a name is one of those under which people keep passwords and the like."""
    return _SECRET.search(name) is not None


def shown(value: Any, name: str = "") -> Any:
    """Return a value fit for JSON and for any reader: stars for what stands under a secret's name, and in URLs."""
    if value and is_secret(name):
        return "***"
    if isinstance(value, Mapping):
        return {str(inner): shown(each, str(inner)) for inner, each in value.items()}
    if isinstance(value, list | tuple | set):
        return [shown(each) for each in value]
    if isinstance(value, str):
        return redact(value)
    return value if value is None or isinstance(value, bool | int | float) else str(value)


def unquote(text: str) -> str:
    """Take off one pair of quotes that a shell or a compose file left on, as LMCache does."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        try:
            inner = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return text
        if isinstance(inner, str):
            return inner
    return text


def flag(raw: Any, key: str, source: str) -> bool:
    """Read true/false/1/0/yes/no/on/off in any case."""
    if isinstance(raw, bool):
        return raw
    word = str(raw).strip().lower() if isinstance(raw, str | int) else ""
    if word in _TRUE or word in _FALSE:
        return word in _TRUE
    raise ConfigError(key, raw, source, "want true or false (also 1/0, yes/no, on/off)")


def whole(low: int, high: int = 2**31 - 1) -> Parser:
    """Make a parser of whole numbers from `low` to `high`; 256.0 is whole, 256.5 is not."""

    def parse(raw: Any, key: str, source: str) -> int:
        reason = f"want a whole number from {low} to {high}"
        number = _number(raw, key, source, reason)
        if not number.is_integer() or not low <= number <= high:
            raise ConfigError(key, raw, source, reason)
        return int(number)

    return parse


def whole_or(word: str, low: int, high: int = 2**31 - 1) -> Parser:
    """Make a parser of whole numbers that takes one `word` as well."""
    number = whole(low, high)

    def parse(raw: Any, key: str, source: str) -> int | str:
        if isinstance(raw, str) and raw.strip().lower() == word:
            return word
        return int(number(raw, key, source))

    return parse


def seconds(raw: Any, key: str, source: str) -> float:
    """Read a positive number of seconds, at most a day."""
    reason = "want a number of seconds greater than 0, at most 86400"
    number = _number(raw, key, source, reason)
    if not 0 < number <= 86_400:
        raise ConfigError(key, raw, source, reason)
    return number


def seconds_or_none(raw: Any, key: str, source: str) -> float:
    """Read a number of seconds where 0 means: none."""
    reason = "want a number of seconds from 0 to 86400"
    number = _number(raw, key, source, reason)
    if not 0 <= number <= 86_400:
        raise ConfigError(key, raw, source, reason)
    return number


def gb_per_s_or_none(raw: Any, key: str, source: str) -> float:
    """Read a rate in GB/s (1e9 bytes) where 0 means: no bound."""
    reason = "want a number of GB/s from 0.00001 to 10000, or 0"
    number = _number(raw, key, source, reason)
    if number != 0 and not 0.00001 <= number <= 10_000:
        raise ConfigError(key, raw, source, reason)
    return number


def size_gib(raw: Any, key: str, source: str) -> float:
    """Read a size greater than 0 and return it in GiB, exactly: a division by a power of two loses no bit."""
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        raise ConfigError(key, raw, source, "want a size: GiB as a number, or with a unit such as 512MB")
    if re.fullmatch(r"0*\.?0*", str(raw).strip() or "-"):
        reason = "a size must be greater than 0: all that is stored and loaded passes through it, kept or not"
        raise ConfigError(key, raw, source, reason)
    return parse_size(raw, key=key, source=source) / GIB


def size_gib_or_none(raw: Any, key: str, source: str) -> float:
    """Read a size in GiB where 0 means: none."""
    try:
        if not isinstance(raw, bool) and float(raw) == 0:
            return 0.0
    except (TypeError, ValueError, OverflowError):
        pass
    return size_gib(raw, key, source)


def gpu_memory(raw: Any, key: str, source: str) -> str:
    """Read SIZE or SIZE,DEVICE: a size greater than 0, and the number of a GPU; returned as written."""
    words = str(raw).split(",")
    is_size = size_gib_or_none(words[0], key, source) > 0
    if not is_size or len(words) > 2 or not all(word.strip().isdecimal() for word in words[1:]):
        reason = "want SIZE or SIZE,DEVICE: 20GB, or 20GB,1 for the second GPU; off for none"
        raise ConfigError(key, raw, source, reason)
    return str(raw)


def text(raw: Any, key: str, source: str) -> str:
    """Read a string; a bare number is what was written (a password of digits in a YAML file)."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, WrittenInt | WrittenFloat):
        return raw.written
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ConfigError(key, raw, source, "want a string: put it in quotes")


def optional(inner: Parser, what: str = "text") -> Parser:
    """Let nothing at all, "", "none" and every word for false mean None; true is an error, since it names no `what`."""

    def parse(raw: Any, key: str, source: str) -> Any:
        if raw is True or (isinstance(raw, str) and raw.strip().lower() in ("true", "yes", "on")):
            raise ConfigError(key, raw, source, f"is no switch: want {what}, or false for none")
        return None if _is_absent(raw) else inner(raw, key, source)

    return parse


def choice(*names: str, absent: str | None = None) -> Parser:
    """Make a parser of one of `names`, in any case, that gives it as spelled here.

    With `absent` the key may be absent: nothing at all, "", "none" and words for false mean that name.
    """
    by_lower = {name.lower(): name for name in names}

    def parse(raw: Any, key: str, source: str) -> str:
        # YAML 1.1 reads a bare off, no, on or yes as a truth value; all four are among our names.
        meant = {False: ("off", "no"), True: ("on", "yes")}[raw] if isinstance(raw, bool) else ()
        word = next((word for word in meant if word in by_lower), absent if absent and _is_absent(raw) else raw)
        name = by_lower.get(word.strip().lower()) if isinstance(word, str) else None
        if name is None:
            raise ConfigError(key, raw, source, "want one of " + ", ".join(names))
        return name

    return parse


def serde(raw: Any, key: str, source: str) -> str | Noted:
    """Read how values are encoded: as they are. LMCache's other encodings are noted, so that its examples start."""
    name = raw.strip().lower() if isinstance(raw, str) else ""
    if _is_absent(raw) or name == "naive":
        return "naive"
    if name not in LOSSY_SERDES + FORMER_SERDES:
        known = ", ".join(LOSSY_SERDES + FORMER_SERDES)
        raise ConfigError(key, raw, source, f"want naive, as which LMCache's others ({known}) are taken")
    size = ": a value takes its full size" if name in LOSSY_SERDES else ""
    return Noted("naive", f"kvredis has no {name} and stores values as they are (naive){size}")


def server_url(raw: Any, key: str, source: str) -> str:
    """Read the URL of a server, checked by the parser that will use it; blanks between its nodes are taken out."""
    url = re.sub(r"\s*,\s*", ",", text(raw, key, source).strip())
    # LMCache's way to write a cluster of Valkey; extra_config's valkey_mode makes the same of it.
    checked = re.sub("^(valkeys?)://", r"\1-cluster://", url) if "," in url else url
    parse_remote(checked, key=key, source=source)
    return url


def directory(raw: Any, key: str, source: str) -> str | Noted:
    """Read a directory or a file:// URL of one and return the path; a leading ~ is the home directory.

    LMCache takes several with commas between them and gives each GPU one. Here the first is used and noted: what would
    be spread over GPUs by LMCache is one tier that all of them share, and a path more would need an arena of its own.
    """
    if str(raw).strip() in ("0", "1"):
        raise ConfigError(key, raw, source, "want a directory, or false for none")
    paths = [path.strip().removeprefix("file://") for path in text(raw, key, source).split(",")]
    first, *others = [os.path.expanduser(path) for path in paths if path] or [""]
    if found := re.search(r"\$\{?[A-Za-z_]\w*\}?", first):
        raise ConfigError(key, raw, source, f"want a directory: {found[0]} is not expanded here, and ~ is")
    if not first or "\0" in first:
        raise ConfigError(key, raw, source, "want a directory, or file:// and a directory")
    if not others:
        return first
    return Noted(first, f"one directory holds the disk tier: {first} is used, {', '.join(others)} not")


def words(raw: Any, key: str, source: str) -> tuple[str, ...]:
    """Read a list of words: a YAML list, or one string with commas or spaces between them."""
    items = raw.replace(",", " ").split() if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items or not all(isinstance(item, str) and item for item in items):
        raise ConfigError(key, raw, source, "want one or more words")
    return tuple(items)


def port(word: str) -> Parser:
    """Make a parser of port numbers that takes one `word` as well, which it gives as -1."""
    number = whole(0, 65535)

    def parse(raw: Any, key: str, source: str) -> int:
        if isinstance(raw, str) and raw.strip().lower() == word:
            return -1
        try:
            return int(number(raw, key, source))
        except ConfigError:
            raise ConfigError(key, raw, source, f"want a port from 0 to 65535, or {word}") from None

    return parse


def some_of(*names: str) -> Parser:
    """Make a parser of one or more of `names`, in any case and order; gives each once, spelled and ordered as here."""

    def parse(raw: Any, key: str, source: str) -> tuple[str, ...]:
        asked = {word.lower() for word in words(raw, key, source)}
        if asked - {name.lower() for name in names}:
            raise ConfigError(key, raw, source, "want one or more of " + ", ".join(names))
        return tuple(name for name in names if name.lower() in asked)

    return parse


def memory(low: int) -> Parser:
    """Make a parser of bytes from `low` on, with the units of redis.conf: k is 1000, kb 1024, and so on."""

    def parse(raw: Any, key: str, source: str) -> int:
        nbytes = _memory(raw) if isinstance(raw, str | int) and not isinstance(raw, bool) else None
        if nbytes is None or not low <= nbytes < 2**63:
            raise ConfigError(key, raw, source, f"want bytes, at least {low}, or with a unit such as 512mb or 1gb")
        return nbytes

    return parse


def buffer_limits(raw: Any, key: str, source: str) -> str:
    """Read client-output-buffer-limit as redis.conf writes it: class, hard limit, soft limit, seconds; any number of
    times. Gives the bytes as numbers and Redis' own name for replicas."""
    parts = text(raw, key, source).lower().split()
    shown: list[str] = []
    for at in range(0, len(parts), 4):
        name, *limits = parts[at : at + 4]
        numbers = [_memory(limit) for limit in limits[:2]]
        numbers += [int(each) for each in limits[2:] if re.fullmatch(r"[0-9]{1,18}", each)]
        if name not in ("normal", "slave", "replica", "pubsub") or len(numbers) != 3 or None in numbers:
            reason = "want CLASS HARD SOFT SECONDS, as in: pubsub 32mb 8mb 60 (classes: normal, replica, pubsub)"
            raise ConfigError(key, raw, source, reason)
        shown += ["slave" if name == "replica" else name, *map(str, numbers)]
    return " ".join(shown)


def file_mode(raw: Any, key: str, source: str) -> str:
    """Read three octal digits that let the owner read and write.

    Which also refuses what YAML 1.1 makes of a bare 0770: the number 504.
    """
    digits = str(raw).strip().removeprefix("0o").rjust(3, "?") if isinstance(raw, str | int) else ""
    if re.fullmatch("0?[67][0-7]{2}", digits) is None:
        raise ConfigError(key, raw, source, "want three octal digits such as 770, in quotes if a 0 comes first")
    return digits[-3:]


def event_classes(raw: Any, key: str, source: str) -> str:
    """Read the letters of notify-keyspace-events."""
    letters = text(raw, key, source).strip()
    if set(letters) - set("KEA" + "g$lshzxetdmn"):
        raise ConfigError(key, raw, source, "want letters of Ag$lshzxeKEtmdn")
    return letters


def scalars(raw: Any, key: str, source: str) -> dict[str, str]:
    """Read a mapping from the names of settings, in any case, to values; true and false are Redis' yes and no."""
    found: dict[str, str] = {}
    for name, value in mapping(raw, key, source).items():
        if not isinstance(value, str | int | float):
            shown = "***" if is_secret(name) else value
            raise ConfigError(f"{key}.{name}", shown, source, "want one value: text or a number")
        found[name.strip().lower()] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)
    return found


def mapping(raw: Any, key: str, source: str) -> dict[str, Any]:
    """Read a mapping: YAML's, or JSON in a string, or in one the {name: value} that JSON is short of quotes for.

    The latter is what a shell leaves of '{'use_odirect': True}' on LMCache's page about disks.
    """
    if _is_absent(raw):
        return {}
    found = _unpacked(raw, key, source) if isinstance(raw, str) else raw
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        shown = "***" if is_secret(str(raw)) else raw
        raise ConfigError(key, shown, source, "want a mapping from names to values, as JSON in the environment")
    return dict(found)


def _unpacked(text: str, key: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        reason = f"not JSON: {error}"
    try:
        found = yaml.load(text, Loader) if text.lstrip().startswith("{") else None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        found = None
    if isinstance(found, dict) and None not in found.values():  # a word without a value is a slip, and no name
        return found
    raise ConfigError(key, "***" if is_secret(text) else text, source, reason)


def _is_absent(raw: Any) -> bool:
    return raw is None or raw is False or (isinstance(raw, str) and raw.strip().lower() in _ABSENT)


def _number(raw: Any, key: str, source: str, reason: str) -> float:
    if isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            return float(raw)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(key, raw, source, reason)


def _memory(raw: str | int) -> int | None:
    found = re.fullmatch(r"(\d{1,19})(b|kb?|mb?|gb?|)", str(raw).strip().lower())
    if found is None:
        return None
    step, power = 1024 if found[2].endswith("b") else 1000, " kmg".index(found[2].strip("b") or " ")
    return int(found[1]) * int(step**power)
