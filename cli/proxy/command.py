"""`kvredis proxy`: the command line of the router, its start and its end."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address
from typing import Any, Final
from urllib.parse import urlsplit

import click

from kvredis.cli.numbers import Number

PREFILL_S_MAX = 120.0
_HOST: Final = re.compile(r"[\w.-]+")


def _urls(_context: click.Context, _parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    """Read the addresses of engines for click: http://HOST:PORT or HOST:PORT, each once, without a slash at the end."""
    found = []
    for value in values:
        url = (value if "://" in value else f"http://{value}").rstrip("/")
        try:
            parts = urlsplit(url)
            is_url = parts.scheme in ("http", "https") and _is_host(parts.hostname or "") and parts.port != 0
        except ValueError:
            is_url = False
        if not is_url or parts.query or parts.fragment:
            raise click.BadParameter(f"{value!r} is not the address of an engine: want http://HOST:PORT")
        if parts.username is not None:
            raise click.BadParameter("an address has no user: what a client sends as Authorization is passed on")
        if url in found:
            raise click.BadParameter(f"{value!r} is named twice")
        found.append(url)
    return tuple(found)


def _is_host(host: str) -> bool:
    """Say whether a name can be looked up, or an address is whole: a number alone is the port of no host. Raises
    ValueError where it is not."""
    if ":" in host:
        return bool(IPv6Address(host))
    if not host.strip("0123456789."):
        return bool(IPv4Address(host))
    return _HOST.fullmatch(host) is not None and bool(host.encode("idna"))


@click.command(
    epilog="""\b
Example: kvredis proxy --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200
Example: kvredis proxy --prefill gpu1:8000 --prefill gpu2:8000 --decode gpu3:8000 --host 0.0.0.0"""
)
@click.option(
    "--prefill", multiple=True, required=True, metavar="URL", callback=_urls,
    help="An engine that computes prompts; more than one take turns.",
)  # fmt: skip
@click.option(
    "--decode", multiple=True, required=True, metavar="URL", callback=_urls,
    help="An engine that generates; more than one take turns.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen at.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Port to listen at; 0: a free one."
)
@click.option(
    "--prefill-timeout",
    "prefill_s_max",
    default=PREFILL_S_MAX,
    show_default=True,
    type=Number(0, min_open=True),
    help="Seconds that prefilling may take; then the decode engine computes the prompt.",
)
@click.option(
    "--at-once",
    is_flag=True,
    help="Ask a decode engine while a prefill engine computes: for engines with kvredis, which load KV as it comes.",
)
def proxy(prefill: tuple[str, ...], decode: tuple[str, ...], **options: Any) -> None:
    """Send prompts to engines that prefill, and then to engines that decode, until SIGTERM or Ctrl-C.

    For vLLM's OpenAI servers, with the interface of vLLM's own example: a completion is asked of a prefill engine
    first, for one token and with kv_transfer_params, and then, with those that it has answered, of a decode engine,
    whose answer is passed on as it comes. All other paths go to a decode engine. A prefill engine that is away costs
    nothing but its speed: the decode engine computes the prompt.
    """
    from .router import run  # late: help needs no aiohttp

    run(prefill, decode, **options)
