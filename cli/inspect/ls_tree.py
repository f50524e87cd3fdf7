"""The tree that `kvredis ls` draws, and the same as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvredis.cli.terminal import TIER_STYLES, duration, shortened, size

from .client import NotAllowed, Servers
from .key_names import CHUNKS, LMCACHE, LMCACHE_MP, OTHER, PAGES
from .prefix_tree import Forest, Group, Sum

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

BAR_COLUMNS = 24
NARROW_COLUMNS = 64
NARROW_ROOT = 9
_KINDS = {CHUNKS: "chunks", PAGES: "pages", LMCACHE: "LMCache chunks", LMCACHE_MP: "LMCache chunks", OTHER: "keys"}


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


# ---- inside ------------------------------------------------------------------------------------------------------


def _line(*parts: tuple[str, str]) -> Text:
    from rich.text import Text

    return Text("  ").join(Text(text, style) for style, text in parts if text)


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
    text = Text(f"{name:6} ", "bold")
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
            ("bold blue", _shown(title)),
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
