"""What stops a measurement: a figure is only worth printing when every byte behind it was right."""

from kvredis.storage.errors import KVRedisError


class BenchError(KVRedisError):
    """A measurement that could not be made: a server did not start, a connection broke, a tool is missing."""


class MissingHits(BenchError):
    """What was stored was not all found again, and the cache has not said that it dropped any."""


class VerificationError(BenchError):
    """Raised when a server returned other bytes than were stored. No figure of that run counts."""
