"""`kvredis ls`: what a server holds, as a tree of models, ranks and prompts, or as a plain list of keys."""

from __future__ import annotations

import heapq
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from kvredis.cli.terminal import (
    TIER_STYLES,
    console,
    duration,
    is_terminal,
    json_text,
    key_bytes,
    printable,
    progress,
    shortened,
    size,
)

from .client import TOGETHER, NotAllowed, Place, Servers, mapped, on_server
from .key_names import CHUNKS, LMCACHE, LMCACHE_MP, OTHER, PAGES
from .key_options import match_option
from .prefix_tree import SORTS, Forest, Group, Sum

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from kvredis.cli.terminal import Moving

LIMIT_DEFAULT: Final = 20
NARROW_FIGURES: Final = 18
"""Columns before the name with --long in a narrow terminal."""
KEYS_LIMIT_DEFAULT: Final = 1000
BAR_COLUMNS = 24
NARROW_COLUMNS = 64
NARROW_ROOT = 9
_KINDS = {CHUNKS: "chunks", PAGES: "pages", LMCACHE: "LMCache chunks", LMCACHE_MP: "LMCache chunks", OTHER: "keys"}


@click.command(
    epilog="""\b
Example: kvredis ls
Example: kvredis ls -u redis://kv-1:6379 --sort hits --limit 5
Example: kvredis ls --match 'kvredis:*Llama*' --json
Example: kvredis ls --keys --long --sort bytes --limit 10
Example: kvredis ls --keys --limit 0 | wc -l
Exit 1: the server could not be asked"""
)
@match_option
@click.option("--keys", "is_flat", is_flag=True, help="List keys, one a line, instead of the tree.")
@click.option("--long", "is_long", is_flag=True, help="With --keys: bytes, tokens, tier, hits and idle time too.")
@click.option(
    "--sort",
    type=click.Choice(SORTS),
    help="What comes first. Default: bytes; with --keys: name, or with --long bytes.",
)
@click.option(
    "--limit",
    type=click.IntRange(0),
    help=f"Show at most so many prompts a rank (default {LIMIT_DEFAULT}), with --keys keys (default "
    f"{KEYS_LIMIT_DEFAULT}); 0 shows all. All keys are listed as the server tells them, unsorted.",
)
@click.option("--json", "is_json", is_flag=True, help="Print JSON.")
@on_server
def ls(
    match: str | None,
    is_flat: bool,
    is_long: bool,
    sort: str | None,
    limit: int | None,
    is_json: bool,
    place: Place,
) -> None:
    """List what a server holds: a tree of models, ranks and prompts with tokens, tiers and hits.

    A prompt stands for all prompts that begin with the same chunk; chunks on disk alone are counted by their length.
    LMCache's keys are grouped by model and worker, others by what stands before their first colon. It is read with
    KV.SCAN, beside everything else that the server does, in memory that does not grow with the number of keys. On a
    plain Redis there are sizes, but no tokens, tiers or hits.
    """
    if is_long and not is_flat:
        raise click.UsageError("--long goes with --keys")
    pattern = None if match is None else key_bytes(match)
    with place.open() as servers:
        if is_flat:
            order = sort or ("bytes" if is_long else "name")
            shown = KEYS_LIMIT_DEFAULT if limit is None else limit
            _list(servers, pattern, _Wanted(order, shown, is_long, is_json))
            return
        forest = Forest()
        with progress("reading keys", _total(servers, pattern)) as bar:
            for key, facts in _known(servers, pattern, bar):
                forest.add(key, facts)
        shown = LIMIT_DEFAULT if limit is None else limit
        tiers = _tiers(servers)
        if is_json:
            click.echo(json.dumps(as_json(servers, forest, sort or "bytes", limit or 0, tiers), indent=2))
        else:
            screen = console()
            tree = drawn(servers, forest, sort or "bytes", shown, tiers, screen.width)
            screen.print(tree, no_wrap=True, overflow="ellipsis")


# ---- inside ------------------------------------------------------------------------------------------------------


class _Wanted(NamedTuple):
    """How a list of keys shall be: `limit` 0 is all of them, unsorted."""

    order: str
    limit: int
    is_long: bool
    is_json: bool


def _known(servers: Servers, pattern: bytes | None, bar: Moving) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Every key that matches and has not gone meanwhile, with its facts."""
    for server in servers.each:
        for batch in server.walk(pattern, ahead=True):
            bar.forward(len(batch))
            for key, facts in batch:
                if facts is not None:
                    yield key, facts


def _total(servers: Servers, pattern: bytes | None) -> int | None:
    """How many keys there will be; None for a pattern, of which no server knows it."""
    return None if pattern is not None else sum(int(server.ask("DBSIZE")) for server in servers.each)


def _tiers(servers: Servers) -> dict[str, dict[str, int]]:
    """Capacity and use of each tier, over all servers; empty for a plain Redis."""
    found: dict[str, dict[str, int]] = {}
    for server in servers.each:
        if not server.is_kvredis:
            continue
        for name, reply in mapped(server.ask("KV.TIERS")).items():
            figures = mapped(reply)
            tier = found.setdefault(name, {"capacity": 0, "used": 0, "entries": 0})
            for figure in tier:
                tier[figure] += int(figures.get(figure, 0))
    return found


def _list(servers: Servers, pattern: bytes | None, wanted: _Wanted) -> None:
    with progress("reading keys", _total(servers, pattern), is_shown=wanted.limit > 0) as bar:
        rows: Iterator[tuple[bytes, dict[str, Any]]]
        if wanted.is_long or wanted.is_json or wanted.order != "name":
            rows = _known(servers, pattern, bar)
        else:
            rows = ((key, {}) for key in _names(servers, pattern, bar))
        if wanted.limit == 0:
            _print_rows(_whole(servers, rows) if wanted.is_json else rows, wanted)
            return
        chosen, more = _first(rows, wanted.order, wanted.limit)
    _print_rows(_whole(servers, iter(chosen)) if wanted.is_json else iter(chosen), wanted)
    if more:
        click.echo(f"{more:,} more: --limit shows them", err=True)


def _whole(servers: Servers, rows: Iterator[tuple[bytes, dict[str, Any]]]) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """These rows with all that KV.META says, some at a time; without those that have gone meanwhile."""
    while part := list(itertools.islice(rows, TOGETHER)):
        told: dict[bytes, dict[str, Any] | None] = dict(part)
        for server, keys in servers.by_slot([key for key, _ in part]):
            if server.is_kvredis:
                told |= zip(keys, server.meta_of(keys), strict=True)
        yield from ((key, facts) for key, facts in told.items() if facts is not None)


def _names(servers: Servers, pattern: bytes | None, bar: Moving) -> Iterator[bytes]:
    for server in servers.each:
        for keys in server.scan(pattern):
            bar.forward(len(keys))
            yield from keys


def _first(
    rows: Iterator[tuple[bytes, dict[str, Any]]], order: str, limit: int
) -> tuple[list[tuple[bytes, dict[str, Any]]], int]:
    """The first `limit` rows in that order without duplicates, and how many others there were."""
    seen = 0

    def counted() -> Iterator[tuple[bytes, dict[str, Any]]]:
        nonlocal seen
        for row in rows:
            seen += 1
            yield row

    def mark(row: tuple[bytes, dict[str, Any]]) -> tuple[Any, bytes]:
        key, facts = row
        if order == "name":
            return (0, key)
        if order == "idle":
            return (facts.get("idle") if facts.get("idle") is not None else float("inf"), key)
        return (-(facts.get("nbytes" if order == "bytes" else order) or 0), key)

    kept = heapq.nsmallest(limit, counted(), key=mark)
    return list(dict(kept).items()), max(seen - limit, 0)


def _print_rows(rows: Iterator[tuple[bytes, dict[str, Any]]], wanted: _Wanted) -> None:
    if wanted.is_json:
        between = "[\n"
        for key, facts in rows:  # one at a time: there may be more of them than memory holds
            known = {name: value for name, value in facts.items() if value is not None}
            click.echo(f"{between}  {json.dumps({'key': json_text(key)} | known)}", nl=False)
            between = ",\n"
        click.echo("[]" if between == "[\n" else "\n]")
        return
    is_drawn = is_terminal(sys.stdout)  # and not whatever FORCE_COLOR makes of a pipe
    columns_left = console().width - NARROW_FIGURES if is_drawn else 0
    is_narrow = is_drawn and columns_left + NARROW_FIGURES < NARROW_COLUMNS
    for key, facts in rows:
        # A terminal must not obey a key; a pipe wants it as it is.
        name = printable(key) if is_drawn else key
        if wanted.is_long:
            tokens = facts.get("tokens")
            if is_narrow:  # what tells least is left out, so that a line is a line
                click.echo(f"{size(facts.get('nbytes') or 0):>8}  {facts.get('tier') or '-':6}  ", nl=False)
                click.echo(shortened(printable(key), max(columns_left, 8)))
                continue
            columns = (
                f"{size(facts.get('nbytes') or 0):>9}  {'-' if tokens is None else f'{tokens:,}':>7}"
                f"  {facts.get('tier') or '-':6}  {facts.get('hits', '-')!s:>6}"
                f"  {'-' if facts.get('idle') is None else duration(facts['idle']):>7}  "
            )
            click.echo(columns, nl=False)
        click.echo(name)


# ---- the tree, drawn and as JSON -------------------------------------------------------------------------------------


def drawn(
    servers: Servers, forest: Forest, sort: str, limit: int, tiers: Mapping[str, Mapping[str, int]], columns: int = 200
) -> Tree:
    """The tree: servers, tiers, then for each model its ranks and at most `limit` (0: all) prompts of each. With few
    `columns` what tells least is left out, so that sizes are seen."""
    from rich.tree import Tree

    is_narrow = columns < NARROW_COLUMNS
    about = _about(servers, forest)
    top = Tree(_line(("bold", ", ".join(map(str, servers.each))), *([] if is_narrow else about)))
    if is_narrow:
        top.add(_line(*about[1:]))
    for name, figures in tiers.items():
        top.add(_tier(name, figures, BAR_COLUMNS // 4 if is_narrow else BAR_COLUMNS))
    for groups in forest.models():
        _add_model(top, groups, sort, limit, is_narrow)
    if not forest.groups:
        top.add(_line(("dim", "no keys")))
    return top


def as_json(
    servers: Servers, forest: Forest, sort: str, limit: int, tiers: Mapping[str, Mapping[str, int]]
) -> dict[str, Any]:
    """The same in fields. `prompts_more` counts those that are not listed one by one."""
    return {
        "servers": [str(server) for server in servers.each],
        "kvredis": all(server.is_kvredis for server in servers.each),
        "keys": forest.whole.keys,
        "bytes": forest.whole.nbytes,
        "tiers": {name: dict(figures) for name, figures in tiers.items()},
        "models": [
            {
                "kind": groups[0].name.kind,
                "model": groups[0].name.model,
                "layout": groups[0].name.layout,
                "ranks": [_group_json(group, sort, limit) for group in groups],
            }
            for groups in forest.models()
        ],
    }


# ---- the tree's lines and fields -------------------------------------------------------------------------------------


def _line(*parts: tuple[str, str]) -> Text:
    from rich.text import Text

    # a key's own words are in its rank as well, and a server's in its version: a terminal must obey none of them
    return Text("  ").join(Text(_shown(text), style) for style, text in parts if text)


def _about(servers: Servers, forest: Forest) -> list[tuple[str, str]]:
    try:
        about = servers.each[0].about
        version = about.get("kvredis_version")
        what = f"kvredis {version}" if version else f"Redis {about.get('redis_version', '')}, no kvredis"
    except NotAllowed:
        what = ""  # who may not ask INFO sees the rest
    return [("", what), ("", _counted(forest.whole.keys, "keys")), ("cyan", size(forest.whole.nbytes))]


def _tier(name: str, figures: Mapping[str, int], columns: int) -> Text:
    from rich.text import Text

    used, capacity = figures["used"], figures["capacity"]
    filled = round(columns * used / capacity) if capacity else 0
    text = Text(f"{_shown(name):6} ", "bold")
    text.append("━" * filled, TIER_STYLES.get(name, "blue"))
    text.append("─" * (columns - filled), "dim")
    return text.append(f" {size(used)} of {size(capacity)}, {figures['entries']:,} entries", "")


def _add_model(top: Tree, groups: list[Group], sort: str, limit: int, is_narrow: bool) -> None:
    name = groups[0].name
    whole = Sum()
    for group in groups:
        whole.join(group.whole)
    title = name.model or "other keys"
    only = groups[0].name.rank if len(groups) == 1 else ""
    branch = top.add(
        _line(
            ("bold blue", title),
            ("dim", "" if is_narrow else name.layout),
            ("magenta", "" if is_narrow else only),
            *_figures(whole, _tokens_text(groups), _KINDS[name.kind]),
        )
    )
    for group in groups:
        under = branch
        if not only and (name.kind != OTHER or len(groups) > 1):
            under = branch.add(
                _line(
                    ("magenta", group.name.rank),
                    *_figures(group.whole, _tokens_text([group]), _KINDS[name.kind]),
                )
            )
        _add_prompts(under, group, sort, limit, is_narrow)


def _add_prompts(under: Tree, group: Group, sort: str, limit: int, is_narrow: bool) -> None:
    prompts = group.order(sort)
    for root, part in prompts[: limit or None]:
        tokens, is_all = group.tokens(part)
        name = shortened(root, NARROW_ROOT) if is_narrow else root
        under.add(_line(("yellow", name), *_figures(part, _tokens(tokens, is_all, bool(part.keys)), "chunks")))
    more = max(len(prompts) - limit, 0) if limit else 0
    if more or group.folded:
        hidden = Sum()
        hidden.join(group.rest)
        for _, part in prompts[len(prompts) - more :]:
            hidden.join(part)
        # those that were folded into one sum cannot be told apart any more
        shown_by = f" (--limit {limit + more} shows {more:,})" if more else ""
        under.add(_line(("dim", f"{more + group.folded:,} more prompts, {size(hidden.nbytes)}{shown_by}")))


def _figures(part: Sum, tokens: str, kind: str) -> list[tuple[str, str]]:
    shares = [
        (TIER_STYLES.get(name, "blue"), f"{name} {100 * nbytes / part.nbytes:.0f}%" if part.nbytes else name)
        for name, (_, nbytes) in sorted(part.tiers.items(), reverse=True)
    ]
    return [
        ("", tokens),
        ("cyan", size(part.nbytes)),
        *shares,
        ("", _counted(part.hits, "hits") if part.idle_s is not None else ""),
        ("", _counted(part.keys - part.asides, kind)),
        ("dim", f"used {duration(part.idle_s)} ago" if part.idle_s is not None else ""),
    ]


def _counted(count: int, plural: str) -> str:
    return f"{count:,} {plural[:-1] if count == 1 else plural}"


def _tokens_text(groups: list[Group]) -> str:
    """Tokens of one rank: each rank holds its share of the same tokens, so the largest rank tells."""
    found = [group.tokens(group.whole) for group in groups]
    is_known = any(tokens for tokens, _ in found)
    return _tokens(max(tokens for tokens, _ in found), all(is_all for _, is_all in found), True) if is_known else ""


def _tokens(count: int, is_all: bool, is_any: bool) -> str:
    if not is_any:
        return ""
    return f"{count:,} tokens" if is_all else f"{count:,}+ tokens" if count else "? tokens"


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() else f"\\x{ord(each):02x}" for each in text)


def _group_json(group: Group, sort: str, limit: int) -> dict[str, Any]:
    prompts = group.order(sort)
    chosen = prompts[: limit or None]
    return {
        "rank": group.name.rank,
        **_sum_json(group, group.whole),
        "prompts": [{"root": root, **_sum_json(group, part)} for root, part in chosen],
        "prompts_more": len(prompts) - len(chosen) + group.folded,
    }


def _sum_json(group: Group, part: Sum) -> dict[str, Any]:
    tokens, is_all = group.tokens(part)
    return {
        "keys": part.keys,
        "bytes": part.nbytes,
        "tokens": tokens,
        "tokens_complete": is_all,
        "hits": part.hits,
        "idle_s": part.idle_s,
        "tiers": {name: {"keys": keys, "bytes": nbytes} for name, (keys, nbytes) in part.tiers.items()},
    }
