"""What the HTTP door answers: health, metrics and the page, each from the module that knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import exposition, health, page
from .http_door import Routes

if TYPE_CHECKING:
    from .server import Server


def routes(server: Server) -> Routes:
    """Every path of a running server."""
    return {**health.routes(server), **exposition.routes(server), **page.routes(server)}
