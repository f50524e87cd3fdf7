"""What the halves of the connector (vllm.py) send each other, at the start and with every step; vLLM pickles it."""

# pyright: reportMissingImports=false

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from .handshake import Handshake
from .scheduling_options import Step

_WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", object)
_HandshakeMetadata: Any = getattr(base, "KVConnectorHandshakeMetadata", object)


class HandshakeMetadata(_HandshakeMetadata):  # type: ignore[misc]
    """What a worker's half sends to the scheduler's before the first request."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake


class StoredMetadata(_WorkerMetadata):  # type: ignore[misc]
    """What the workers' half sends back: requests whose stores so far are over."""

    def __init__(self, requests: set[str]) -> None:
        self.requests = requests

    def aggregate(self, other: Any) -> "StoredMetadata":
        """Those of several workers."""
        return StoredMetadata(self.requests | other.requests)


class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half sends to the workers'."""

    def __init__(self, step: Step) -> None:
        self.step = step
