"""What can be wrong with a server's options, found out before there is an arena and anybody has connected.

CONFIG's table (settings.py) knows how a value is checked; it serves here too, so that a value in a file means what it
means in CONFIG SET, and a wrong one stops the start instead of a client.
"""

from collections.abc import Mapping
from dataclasses import fields

from kvredis.server.cluster.node import Cluster
from kvredis.server.net.tls import OPTION, make_context
from kvredis.server.options import ServerOptions
from kvredis.storage.errors import ConfigError

from .settings import SettingError, checked

OWN_KEYS = frozenset(field.name for field in fields(ServerOptions))


def check_options(options: ServerOptions) -> None:
    """Try all that costs nothing to find out. Raises ConfigError, its source OPTION and its key that of an option, or
    "settings.NAME"."""
    check_settings(options.settings)
    if options.tls_port != 0:
        make_context(options)
    if options.cluster_topology is not None:
        Cluster(options)


def check_settings(settings: Mapping[str, str]) -> None:
    """Try further settings, by their names in CONFIG."""
    for name, text in settings.items():
        own = name.replace("-", "_")
        if own in OWN_KEYS:  # one value in two places; and it may be a password
            raise ConfigError(f"settings.{name}", "***", OPTION, f"has a key of its own: {own}")
        try:
            checked(name, text)
        except SettingError as wrong:
            raise ConfigError(f"settings.{name}", text, OPTION, wrong.reason) from None
