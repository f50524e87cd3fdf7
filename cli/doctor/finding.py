"""What `kvredis doctor` says of one thing, and how it looks: a table on a terminal, plain lines in a pipe, JSON.

A finding is ok, not ok, or neither (a fact that nothing asked for). Only "not ok" makes the exit status 1: the machine
does not give what the configuration asks, and `kvredis serve` would refuse to start, or start with less.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvredis.cli.terminal import is_terminal

_MARKS = {True: "ok", False: "NO", None: "--"}
_STYLES = {True: "green", False: "bold red", None: "dim"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at: `ok` None means that nothing asks for it; `fix` is a line to type or to change."""

    name: str
    ok: bool | None
    found: str
    needed: str = ""
    fix: str = ""


def report(ctx: click.Context, findings: Sequence[Finding], as_json: bool) -> None:
    """Print the findings and exit: 1 if one is not ok."""
    if as_json:
        click.echo(json.dumps({finding.name: asdict(finding) for finding in findings}, indent=2))
    elif is_terminal(sys.stdout):
        draw(findings, Console())
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            needed = f"; needed: {finding.needed}" if finding.needed else ""
            click.echo(f"{_MARKS[finding.ok]}  {finding.name:{width}}  {finding.found}{needed}")
            if finding.fix:
                click.echo(f"    {'':{width}}  {finding.fix}")
    ctx.exit(1 if any(finding.ok is False for finding in findings) else 0)


def draw(findings: Sequence[Finding], console: Console) -> None:
    """Draw the table; a fix has a line of its own across it, since it is there to be copied."""
    table = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold")
    for heading in ("", "what", "found", "needed"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        style = _STYLES[finding.ok]
        mark = Text(_MARKS[finding.ok], style=style)
        table.add_row(mark, Text(finding.name), Text(finding.found), Text(finding.needed))
    console.print(table)
    for ok, heading in ((False, "What the configuration asks for and this machine does not give:"), (None, "Better:")):
        fixes = [finding for finding in findings if finding.fix and (finding.ok is False) == (ok is False)]
        if fixes:
            console.print(Text(f"\n{heading}", style=_STYLES[False] if ok is False else "bold"))
        for finding in fixes:
            console.print(Text(f"  {finding.name}: {finding.fix}"), soft_wrap=True)
