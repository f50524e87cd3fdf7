"""`kvredis bench plot`: a picture of a result that was written earlier, of whichever bench."""

from pathlib import Path

import click

from kvredis.bench.pictures import draw_file
from kvredis.storage.errors import KVRedisError


@click.command(epilog="Example: kvredis bench plot bench/results/server-2026-11-22.json server.png")
@click.argument("result", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("picture", type=click.Path(dir_okay=False, path_type=Path))
def plot(result: Path, picture: Path) -> None:
    """Draw RESULT, a JSON file of bench memory, transport, server, disk or links, into PICTURE, a PNG."""
    try:
        draw_file(result, picture)
    except KVRedisError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"Picture: {picture}")
