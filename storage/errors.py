"""Every error that kvredis raises on purpose, so that a caller can catch the family or the one.

Ordinary outcomes (a miss, a full arena, a bound reached) are return values, never one of these.
"""


class KVRedisError(Exception):
    """The family: whatever kvredis raises on purpose."""


class ConfigError(KVRedisError):
    """A configuration value that cannot be used. The text names key, value, source and line; the CLI exits with 2."""

    def __init__(self, key: str, value: object, source: str, reason: str) -> None:
        super().__init__(f"{source}: {key}: {reason} (got {value!r})")
        self.key, self.value, self.source, self.reason = key, value, source, reason


class ArenaError(KVRedisError):
    """The arena's memory could not be had or mapped."""


class HugepageShortage(ArenaError):
    """The 2 MiB hugepage pool is smaller than the arena that was required from it."""


class DeviceError(KVRedisError):
    """A GPU's memory could not be had, shared or copied; `code` is the driver's CUresult, 0 where it was not asked."""

    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class LayoutError(KVRedisError, ValueError):
    """A block whose header or size is not what its layout says; treated as a miss by the engine."""


class BackendError(KVRedisError):
    """A remote store could not be reached, refused the command or broke the protocol."""
