"""How one configuration value is written: parsers that refuse what they do not understand.

LMCache turns a bad value into None and fails later, far from the line at fault. Here each parser takes the raw value (a
string from the environment or a flag, any YAML type from a file), and returns the value in its own type or raises
ConfigError with the key, the value and the source. All of them are total: no other exception leaves them.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from typing import Any

from kvredis.storage.errors import ConfigError
from kvredis.storage.options import GIB, parse_size

from .address import parse_url

# (raw value, key, source) -> value
Parser = Callable[[Any, str, str], Any]

_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})


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


def whole_or(word: str, low: int) -> Parser:
    """Make a parser of whole numbers that takes one `word` as well."""
    number = whole(low)

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


def size_gib(raw: Any, key: str, source: str) -> float:
    """Read a size greater than 0 and return it in GiB, exactly: a division by a power of two loses no bit."""
    if not isinstance(raw, str | int | float) or isinstance(raw, bool):
        raise ConfigError(key, raw, source, "want a size: GiB as a number, or with a unit such as 512MB")
    return parse_size(raw, key=key, source=source) / GIB


def size_gib_or_none(raw: Any, key: str, source: str) -> float:
    """Read a size in GiB where 0 means: none."""
    try:
        if not isinstance(raw, bool) and float(raw) == 0:
            return 0.0
    except (TypeError, ValueError):
        pass
    return size_gib(raw, key, source)


def text(raw: Any, key: str, source: str) -> str:
    """Read a string; a bare number is its digits (a password of digits in a YAML file)."""
    if isinstance(raw, str):
        return raw
    if isinstance(raw, int | float) and not isinstance(raw, bool):
        return str(raw)
    raise ConfigError(key, raw, source, "want a string")


def optional(inner: Parser) -> Parser:
    """Let nothing at all, "" and "none" mean None."""

    def parse(raw: Any, key: str, source: str) -> Any:
        if raw is None or (isinstance(raw, str) and raw.strip().lower() in ("", "none", "null")):
            return None
        return inner(raw, key, source)

    return parse


def choice(*names: str, absent: str | None = None) -> Parser:
    """Make a parser of one of `names`, in any case, that gives it as spelled here; null means `absent` if given."""
    by_lower = {name.lower(): name for name in names}

    def parse(raw: Any, key: str, source: str) -> str:
        # YAML 1.1 reads a bare off or no as false; "off" is one of our names.
        word = "off" if raw is False else absent if raw is None else raw
        name = by_lower.get(word.strip().lower()) if isinstance(word, str) else None
        if name is None:
            raise ConfigError(key, raw, source, "want one of " + ", ".join(names))
        return name

    return parse


def server_url(raw: Any, key: str, source: str) -> str:
    """Read the URL of a server, checked by the parser that will use it."""
    url = text(raw, key, source).strip()
    parse_url(url, key=key, source=source)
    return url


def directory(raw: Any, key: str, source: str) -> str:
    """Read a directory or a file:// URL of one and return the path."""
    return text(raw, key, source).strip().removeprefix("file://")


def words(raw: Any, key: str, source: str) -> tuple[str, ...]:
    """Read a list of words: a YAML list, or one string with commas or spaces between them."""
    items = raw.replace(",", " ").split() if isinstance(raw, str) else raw
    if not isinstance(items, list | tuple) or not items or not all(isinstance(item, str) and item for item in items):
        raise ConfigError(key, raw, source, "want one or more words")
    return tuple(items)


def mapping(raw: Any, key: str, source: str) -> dict[str, Any]:
    """Read a mapping: YAML's, or JSON in a string."""
    if raw is None:
        return {}
    if isinstance(raw, str):
        try:
            raw = json.loads(raw or "{}")
        except ValueError as error:
            raise ConfigError(key, raw, source, f"not JSON: {error}") from None
    if not isinstance(raw, dict) or not all(isinstance(name, str) for name in raw):
        raise ConfigError(key, raw, source, "want a mapping from names to values, as JSON in the environment")
    return dict(raw)


def _number(raw: Any, key: str, source: str, reason: str) -> float:
    if isinstance(raw, str | int | float) and not isinstance(raw, bool):
        try:
            return float(raw)
        except (ValueError, OverflowError):
            pass
    raise ConfigError(key, raw, source, reason)
