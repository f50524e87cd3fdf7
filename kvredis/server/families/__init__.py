"""The command families: one file for each, which registers its commands in the table when it is imported.

Beside them stand what only one of them needs (`rdb`, `lzf` and `crc64` for DUMP, `long_double` for INCRBYFLOAT, the
sections of INFO). Families whose state the server itself needs (transactions, pauses, slow log, latency, monitors) live
one floor up, next to what uses them.
"""

from importlib import import_module

FAMILIES = (
    "families.connection",
    "families.clients",
    "pausing",
    "transactions",
    "families.acl_commands",
    "families.pubsub_commands",
    "families.tracking_commands",
    "families.introspect",
    "families.info",
    "families.config_commands",
    "families.keys",
    "families.expiry",
    "families.renames",
    "families.databases",
    "families.objects",
    "families.dump",
    "families.strings",
    "families.getset",
    "families.edits",
    "families.counters",
    "families.lcs",
    "families.kv",
    "families.lane",
    "families.parts",
    "families.prefetching",
    "families.server_commands",
    "families.durability",
    "families.cluster",
    "families.memory",
    "slowlog",
    "latency",
    "monitor",
    "splicing",
    "families.debug",
)


def load_families() -> None:
    """Fill the command table. A second call changes nothing: a module is imported once."""
    for name in FAMILIES:
        import_module(f"kvredis.server.{name}")
