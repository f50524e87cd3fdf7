"""What the HTTP server answers: health, metrics and the page, each from the module that knows it."""

from __future__ import annotations

from kvredis.server.context import Context
from kvredis.server.metrics import prometheus

from . import health
from .page import page
from .server import Routes


def routes(server: Context) -> Routes:
    """Every path of a running server."""
    return {**health.routes(server), **prometheus.routes(server), **page.routes(server)}
