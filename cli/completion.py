"""`kvredis completion`: what to put where, so that the Tab key knows subcommands, options and the server's keys."""

from __future__ import annotations

from typing import Any, Final

import click
from click.shell_completion import get_completion_class

COMPLETE_VARIABLE: Final = "_KVREDIS_COMPLETE"
"""What click looks for when `kvredis` is asked to complete; it is made of the command's name."""

LINES: Final = {
    "bash": (
        "# kvredis: these lines belong into ~/.bashrc",
        "shopt -u hostcomplete  # or bash ends a word at each @, whatever the next line says",
        'COMP_WORDBREAKS="${COMP_WORDBREAKS//[:@]/}"  # a key is one word',
        f'eval "$({COMPLETE_VARIABLE}=bash_source kvredis)"',
    ),
    "zsh": (
        "# kvredis: this line belongs into ~/.zshrc, behind compinit",
        f'eval "$({COMPLETE_VARIABLE}=zsh_source kvredis)"',
    ),
    "fish": (
        "# kvredis: this line belongs into ~/.config/fish/completions/kvredis.fish",
        f"{COMPLETE_VARIABLE}=fish_source kvredis | source",
    ),
}


@click.command(
    epilog="""\b
Example: kvredis completion bash >> ~/.bashrc
Example: kvredis completion fish > ~/.config/fish/completions/kvredis.fish
Example: kvredis completion zsh --script > _kvredis"""
)
@click.argument("shell", type=click.Choice(list(LINES)))
@click.option("--script", is_flag=True, help="Print the whole script that those lines load.")
@click.pass_context
def completion(ctx: click.Context, shell: str, script: bool) -> None:
    """Print the lines that complete kvredis in your shell, with a comment that says where they belong.

    Subcommands, options, choices and files are completed, and keys: the server of -u (or of the configuration) is asked
    for names, and has 0.2 seconds to answer.
    """
    if not script:
        click.echo("\n".join(LINES[shell]))
        return
    made: type[Any] | None = get_completion_class(shell)
    assert made is not None
    click.echo(made(ctx.find_root().command, {}, "kvredis", COMPLETE_VARIABLE).source())
