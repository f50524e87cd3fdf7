"""Commands, one file for each group, which registers its commands in the table (registry.py) when it is imported.

The state of a group stands beside its commands. Groups whose state another folder owns (acl, cluster, config, shm) have
their commands there. `compat` has what a block store seldom meets; no hot path imports it.
"""

from importlib import import_module

FAMILIES = (
    "commands.connection",
    "commands.client",
    "commands.transactions",
    "acl.commands",
    "commands.pubsub",
    "commands.command",
    "commands.info",
    "config.commands",
    "commands.keys",
    "commands.expire",
    "commands.rename",
    "commands.compat.dump",
    "commands.strings",
    "commands.getset",
    "commands.incr",
    "commands.compat.lcs",
    "commands.kv",
    "shm.commands",
    "commands.multipart",
    "commands.prefetch",
    "commands.server",
    "commands.persistence",
    "cluster.commands",
    "commands.memory",
    "commands.slowlog",
    "commands.latency",
    "commands.monitor",
    "commands.compat.debug",
)


def load_families() -> None:
    """Fill the command table. A second call changes nothing: a module is imported once."""
    for name in FAMILIES:
        import_module(f"kvredis.server.{name}")
