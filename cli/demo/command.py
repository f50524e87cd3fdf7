"""`kvredis demo`: the group of its commands."""

import click

from .pd import pd
from .ttft import ttft


@click.group(
    epilog="""\b
Example: kvredis demo ttft --max-new-tokens 16
Example: kvredis demo pd"""
)
def demo() -> None:
    """See what stored KV is worth on this machine."""


demo.add_command(ttft)
demo.add_command(pd)
