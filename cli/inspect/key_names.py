"""What a key's name tells of a block: whose model, which rank, which prompt. Read from names alone, ours and LMCache's.

    kvredis:<model>@<fingerprint>@{<shard>@<root>}<digest>    a chunk (kvredis/adapters/engine/keys.py)
    kvredis:<model>@<facts>:<page>                            a page (kvredis/adapters/paged/pages.py)
    <model>@<world>@<worker>@<hash>@<dtype>[@layer][@tag%v]   LMCache; behind redis:// with "metadata" or "kv_bytes"
    <model>@<rank, 8 digits>@<group>@<hash>[@salt]            LMCache's multi-process server

Anything else is an application's own, and told by what stands before its first colon. (LMCache 0.5.6: lmcache/utils.py,
CacheEngineKey.to_string; v1/storage_backend/connector/redis_connector.py; native_connector_l2_adapter.py.)
"""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

CHUNKS, PAGES, LMCACHE, LMCACHE_MP, OTHER = "chunks", "pages", "LMCache", "LMCache MP", "other"

_CHUNK_HEAD: Final = re.compile(r"kvredis:(.*)@([0-9a-f]{16})@\{(\d+)(?:/(\d+))?(?::([^@]+))?@([0-9a-f]+)")
_DIGEST: Final = re.compile(r"[0-9a-f]+")
_PAGE: Final = re.compile(r"kvredis:(.*)@([0-9a-f]{16}):(.+)", re.DOTALL)
_LMCACHE_MP: Final = re.compile(r"([^@]+)@([0-9a-f]{8})@([0-9a-f]+)@([0-9a-f]{16,})(@.+)?", re.DOTALL)
_LMCACHE: Final = re.compile(
    r"(.+?)@(\d+)@(\d+)@(-?[0-9a-f]+)@((?:bfloat16|half|float|double|u?int\d+|bool|fp8_e\dm\dfn?(?:uz)?)(?:@.*?)?)"
    r"(kv_bytes|metadata)?",
    re.DOTALL,
)
_PREFIX_MAX: Final = 48


class KeyName(NamedTuple):
    """What a name says. `layout` keeps apart what is not alike in shape; `root` is the same for prompts that begin
    alike, "" where names do not tell; `is_aside` marks the second key of a value that has two."""

    kind: str
    model: str
    layout: str
    rank: str
    root: str = ""
    is_aside: bool = False


def read_name(key: bytes) -> KeyName:
    """Take a key's name apart. Total: there is no name that it refuses."""
    text = key.decode("utf-8", "backslashreplace")
    head, _, digest = text.rpartition("}")
    if head and _DIGEST.fullmatch(digest) and (name := _read_head(head)) is not None:
        return name
    if text.startswith("kvredis:") and (found := _PAGE.fullmatch(text)):
        return KeyName(PAGES, found[1], found[2], "")
    parts = text.count("@")  # asked first, as it costs a tenth of a look for the pattern
    if parts >= 3 and (found := _LMCACHE_MP.fullmatch(text)):
        return KeyName(LMCACHE_MP, found[1], f"group {found[3]}", f"rank {found[2]}")
    if parts >= 4 and (found := _LMCACHE.fullmatch(text)):
        dtype = found[5].partition("@")[0]
        return KeyName(LMCACHE, found[1], dtype, f"worker {found[3]} of {found[2]}", "", found[6] == "metadata")
    prefix, colon, _ = text.partition(":")
    return KeyName(OTHER, f"{prefix[:_PREFIX_MAX]}{colon}" if colon else "", "", "")


@functools.lru_cache(4096)  # the chunks of a prompt have it in common
def _read_head(head: str) -> KeyName | None:
    """What stands in a chunk's name before the brace that closes; None where it is no chunk's."""
    found = _CHUNK_HEAD.fullmatch(head)
    if found is None:
        return None
    of_ranks = f" of {found[4]}" if found[4] else ""
    layers = f", layers {found[5]}" if found[5] else ""
    return KeyName(CHUNKS, found[1], found[2], f"rank {found[3]}{of_ranks}{layers}", found[6])
