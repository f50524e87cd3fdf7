"""What the halves of the connector (connector.py) send each other, at the start and with every step; vLLM pickles
it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from .handshake import Handshake
from .scheduler_options import Step
from .weights import WeightsReport

_WorkerMetadata: Any = getattr(base, "KVConnectorWorkerMetadata", object)
_HandshakeMetadata: Any = getattr(base, "KVConnectorHandshakeMetadata", object)


class HandshakeMetadata(_HandshakeMetadata):  # type: ignore[misc]
    """What a worker's half sends to the scheduler's before the first request."""

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake


class WorkerMetadata(_WorkerMetadata):  # type: ignore[misc]
    """What the workers' half sends back: requests whose stores so far are over, and by rank what is to be known of the
    weights."""

    def __init__(self, requests: set[str], weights: dict[int, WeightsReport]) -> None:
        self.requests = requests
        self.weights = weights

    def aggregate(self, other: Any) -> "WorkerMetadata":
        """Those of several workers."""
        return WorkerMetadata(self.requests | other.requests, self.weights | other.weights)


class StepMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler's half sends to the workers'."""

    def __init__(self, step: Step) -> None:
        self.step = step
