"""vLLM's KV events of what its connector has stored: BlockStored and BlockRemoved, for routers that listen to them.

A block is a chunk here: block_size is the tokens of it, its hash the digest in its key, which every engine with the
same model computes alike. The medium says which tier has it: CPU this engine's memory, STORAGE its disk or a server.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from vllm.distributed import kv_events

from kvredis.backends.base import Tier

from .stored_events import Removed, Stored

CPU, STORAGE = getattr(kv_events, "MEDIUM_CPU", "CPU"), getattr(kv_events, "MEDIUM_STORAGE", "STORAGE")


def events_of(told: Iterable[Stored | Removed]) -> Iterator[Any]:
    """What vLLM publishes of it, with the fields that this version of vLLM has."""
    for each in told:
        where: dict[str, Any] = {"medium": medium_of(each.tier), "group_idx": each.group}
        if isinstance(each, Removed):
            yield _event(kv_events.BlockRemoved, block_hashes=[each.digest], **where)
            continue
        yield _event(
            kv_events.BlockStored,
            block_hashes=[each.digest],
            parent_block_hash=each.parent,
            token_ids=list(each.tokens),
            block_size=len(each.tokens),
            lora_id=None,
            lora_name=None,
            **where,
        )


def medium_of(tier: Tier) -> str:
    """vLLM's word for where a block is."""
    return str(CPU if tier == "memory" else STORAGE)


def _event(kind: Any, **fields: Any) -> Any:
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
