"""Which command families there are. Importing a family registers its commands; this is the one place that does it."""

from importlib import import_module

FAMILIES = ("connection", "clients", "introspect", "info", "settings", "keys", "objects", "strings", "kv")


def load_families() -> None:
    """Fill the command table. A second call changes nothing: a module is imported once."""
    for name in FAMILIES:
        import_module(f".{name}", __package__)
