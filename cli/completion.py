"""`kvredis completion`: what to put where, so that the Tab key knows subcommands, options and the server's keys."""

from __future__ import annotations

from typing import Any, Final

import click
from click.shell_completion import BashComplete, add_completion_class, get_completion_class

from .main import COMPLETE_VARIABLE

LINES: Final = {
    "bash": (
        "# kvredis: this line belongs into ~/.bashrc",
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


_BASH: Final = r"""
%(complete_func)s() {
    # Keys hold : and @, at which bash ends a word, by settings that are the user's. So the line is cut at blanks here,
    # and of what is offered bash gets the part behind what it takes for the words before.
    local line="${COMP_LINE:0:COMP_POINT}" last="${COMP_WORDS[COMP_CWORD]}" response type value
    local word="${line##*[[:blank:]]}" before count
    local -a words
    read -r -a words <<< "$line"
    count=$((${#words[@]} - 1))
    [[ -z $word ]] && count=$((count + 1))
    before="${word%%"${word##*[:@=]}"}"
    if [[ -n ${last//[:@=]/} && $word == *"$last" ]]; then
        before="${word%%"$last"}"
    fi
    shopt -q hostcomplete && before="${before%%@}"  # with which an @ belongs to the word behind it
    response=$(env COMP_WORDS="$line" COMP_CWORD=$count %(complete_var)s=bash_complete "$1")
    while IFS=, read -r type value; do
        case $type in
            dir) COMPREPLY=(); compopt -o dirnames ;;
            file) COMPREPLY=(); compopt -o default ;;
            plain) COMPREPLY+=("${value#"$before"}") ;;
        esac
    done <<< "$response"
    return 0
}

complete -o nosort -F %(complete_func)s %(prog_name)s
"""


@add_completion_class
class KeyBashComplete(BashComplete):
    """click's completion for bash, for words with : and @ in them and without a change of the shell's settings."""

    name = "bash"
    source_template = _BASH


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
