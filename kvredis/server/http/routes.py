"""What the HTTP door answers: health, metrics and the page, each from the module that knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvredis.server.metrics import prometheus

from . import health
from .page import page
from .server import Routes

if TYPE_CHECKING:
    from kvredis.server.server import Server


def routes(server: Server) -> Routes:
    """Every path of a running server."""
    return {**health.routes(server), **prometheus.routes(server), **page.routes(server)}
