"""Which command families there are. Importing a family registers its commands; this is the one place that does it."""

from importlib import import_module

FAMILIES = (
    "connection",
    "clients",
    "pausing",
    "transactions",
    "acl_commands",
    "pubsub_commands",
    "tracking_commands",
    "introspect",
    "info",
    "config_commands",
    "keys",
    "expiry",
    "renames",
    "databases",
    "objects",
    "dump",
    "strings",
    "getset",
    "edits",
    "counters",
    "lcs",
    "kv",
    "server_commands",
    "cluster",
    "memory",
    "slowlog",
    "latency",
    "monitor",
    "debug",
)


def load_families() -> None:
    """Fill the command table. A second call changes nothing: a module is imported once."""
    for name in FAMILIES:
        import_module(f".{name}", __package__)
