"""/health: whether this server is worth talking to, for probes and load balancers, open to all who reach the port.

"ok" is 200, all else 503 with the reason. /health knows all of it; /health/ready and /health/live are for Kubernetes,
which takes a pod that is not ready from its clients and starts one anew that is not alive: neither is good for a server
whose disk is broken and that still answers out of memory, so only /health tells of that. A server that answers at all
is live. Before the store is there, `starting` answers.
"""

from __future__ import annotations

import json
from typing import Final

from kvredis import __version__
from kvredis.server.context import Context

from .server import HttpRequest, HttpResponse, Routes

JSON: Final = "application/json"
STARTING: Final = "starting: the arena and the disk tier are being made ready"
STOPPING: Final = "shutting down"
WRITES_FAIL: Final = "the disk tier does not take what is written"
STALLED: Final = "the disk tier does not answer"
UNSYNCED: Final = "the disk tier has refused to confirm what was written; nothing is confirmed until the next start"


def routes(server: Context) -> Routes:
    """The open paths of a server that is there."""

    def health(_request: HttpRequest) -> HttpResponse:
        return told(trouble(server), server.uptime_s)

    def ready(_request: HttpRequest) -> HttpResponse:
        return told(STOPPING if server.shutdown_wanted.is_set() else None, server.uptime_s)

    def live(_request: HttpRequest) -> HttpResponse:
        return told(None, server.uptime_s)

    return {"/health": (health, False), "/health/ready": (ready, False), "/health/live": (live, False)}


def starting() -> Routes:
    """Every path while there is no server yet."""

    def not_yet(_request: HttpRequest) -> HttpResponse:
        return told(STARTING, 0.0)

    def live(_request: HttpRequest) -> HttpResponse:
        return told(None, 0.0)

    waiting = ("/", "/api/state", "/api/arena", "/api/keys", "/metrics", "/health", "/health/ready")
    return {"/health/live": (live, False), **dict.fromkeys(waiting, (not_yet, False))}


def trouble(server: Context) -> str | None:
    """Why a load balancer should rather send no client here; None if all is well."""
    if server.shutdown_wanted.is_set():
        return STOPPING
    tiering = server.store.tiering
    if tiering is None:
        return None
    if tiering.disk.distrusted:
        return UNSYNCED
    if tiering.disk_io.failing:
        return WRITES_FAIL
    return STALLED if tiering.disk_io.stalled else None


def told(reason: str | None, uptime_s: float) -> HttpResponse:
    """The answer: {"status": "ok" or "unavailable", "reason", "version", "uptime_seconds"}."""
    said = {"status": "ok"} if reason is None else {"status": "unavailable", "reason": reason}
    body = json.dumps({**said, "version": __version__, "uptime_seconds": round(uptime_s, 3)}) + "\n"
    return HttpResponse(200 if reason is None else 503, body.encode(), JSON)
