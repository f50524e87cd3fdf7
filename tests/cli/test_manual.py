"""The whole tree of commands: each has a page with examples, and each example is one that the command line takes."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvredis.cli.main import main
from kvredis.cli.manual import examples, exits

from .inspected import run

BETWEEN = ("|", ";", "&&", ">", ">>", "<")


def commands() -> list[tuple[str, click.Command]]:
    """Every command by its words."""

    def below(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
        yield path, command
        if isinstance(command, click.Group):
            ctx = click.Context(command)
            for name in command.list_commands(ctx):
                found = command.get_command(ctx, name)
                assert found is not None
                yield from below(found, f"{path} {name}")

    return list(below(main, "kvredis"))


TREE = commands()


def invocations(line: str) -> list[list[str]]:
    """The words behind `kvredis` of each time that a shell line calls it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if word in BETWEEN:
            parts.append([])
        else:
            parts[-1].append(word)
    found = []
    for words in parts:
        while words and "=" in words[0] and words[0].partition("=")[0].isupper():
            words = words[1:]
        if words[:1] == ["kvredis"]:
            found.append(words[1:])
    return found


def parse(words: list[str]) -> None:
    """Do all that a command line goes through before something is done; raises what click raises."""
    ctx = main.make_context("kvredis", list(words))
    # click keeps the subcommand's name apart from its words, under a name that it has hidden
    while isinstance(ctx.command, click.Group) and (rest := [*ctx._protected_args, *ctx.args]):
        name, command, rest = ctx.command.resolve_command(ctx, rest)
        assert command is not None
        ctx = command.make_context(name, rest, parent=ctx)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files are that examples name."""
    shape = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "before" / "kvredis").mkdir(parents=True)
    here = tmp_path / "here"
    (here / "model").mkdir(parents=True)
    (here / "model" / "config.json").write_text(json.dumps(shape | {"torch_dtype": "bfloat16"}))
    (here / "bench" / "results").mkdir(parents=True)
    for name in ("disk", "server-2026-11-30"):
        (here / "bench" / "results" / f"{name}.json").write_text("{}")
    (here / "README.md").write_text("A prompt.")
    monkeypatch.chdir(here)
    return here


@pytest.mark.parametrize(("path", "command"), TREE, ids=[path for path, _ in TREE])
def test_every_command_has_a_page(path: str, command: click.Command) -> None:
    result = run(*path.split()[1:], "--help")
    assert result.exit_code == 0
    heads = [line for line in result.stdout.splitlines() if line and not line.startswith(" ")]
    wanted = ["Name:", "Synopsis:", "Description:", "Options:", "Examples:", "Exit status:"]
    assert [head for head in heads if head in wanted] == wanted
    assert result.stdout.startswith(f"Name:\n  {path} - ")
    assert set(exits(command)) == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("path", "line"), [(path, line) for path, command in TREE for line in examples(command)] or [("", "")]
)
def test_every_example_parses_and_is_of_its_command(path: str, line: str, folder: Path) -> None:
    called = invocations(line)
    assert called, f"{line}: it calls no kvredis"
    assert any(["kvredis", *words][: len(path.split())] == path.split() for words in called)
    for words in called:
        parse(words)


@pytest.mark.parametrize(("path", "command"), TREE, ids=[path for path, _ in TREE])
def test_every_command_has_an_example(path: str, command: click.Command) -> None:
    assert examples(command)
    for line in examples(command):
        assert line in run(*path.split()[1:], "--help").stdout, "an example is not broken into lines"


@pytest.mark.parametrize("line", ["kvredis ls --nosuch", "kvredis get", "kvredis top --interval x", "kvredis nothing"])
def test_an_example_that_is_wrong_would_be_seen(line: str) -> None:
    (words,) = invocations(line)
    with pytest.raises(click.UsageError):
        parse(words)
