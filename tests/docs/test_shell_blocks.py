"""What README and documentation tell a reader to type works: each page's blocks are run, in order, on a real server.

What cannot run here says why in the source; it must at least be a shell's grammar, and name commands and options that
there are. The same is asked of each command within a sentence.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest
import yaml

from kvredis.cli.main import main
from tests.docs.blocks import (
    LANGUAGES,
    PAGES,
    ROOT,
    RUN,
    Block,
    blocks_of,
    commands_of,
    exchanges,
    inline_commands,
    prose_of,
)
from tests.docs.stage import play, rewritten
from tests.gate import nightly

PROGRAMS = ("redis-cli", "curl", "openssl")
"""What pages use that not every machine has; scripts/system-packages installs them."""
LONG = {"engines.md", "performance.md"}
"""Pages whose blocks run an engine or a benchmark; README and quickstart run both in the gate."""
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
NOT_RUN = [block for block in BLOCKS if block.language in ("sh", "console") and not block.runs]
INLINE = [(f"{page.relative_to(ROOT)}:{line}", text) for page in PAGES for line, text in inline_commands(page)]


def page_name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page",
    [nightly(page) if page.name in LONG else page for page in PAGES if any(b.runs for b in blocks_of(page))],
    ids=page_name,
)
def test_what_a_page_says_to_type_works(page: Path, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    needs = {word for block in blocks if block.runs for word in PROGRAMS if word in block.text}
    missing = sorted(word for word in needs if shutil.which(word) is None)
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{', '.join(missing)} not installed")
    outcome = play(blocks, tmp_path)
    assert outcome.status == 0, outcome.output
    for (at, turn), (status, answer) in outcome.answers.items():
        command, expected = exchanges(blocks[at])[turn]
        where = f"{blocks[at].place}: $ {command}\n{answer}\n-- expected\n{expected}"
        if expected:
            assert re.fullmatch(as_pattern(rewritten(expected, outcome.rewrites)), answer.rstrip()), where
        else:
            assert status == 0, where


def as_pattern(expected: str) -> str:
    """An expected output as a regular expression: `...` stands for anything, blanks at an end of a line for nothing."""
    lines = "\n".join(line.rstrip() for line in expected.rstrip().splitlines())
    return "(?s)" + re.escape(lines).replace(re.escape("..."), ".*")


@pytest.mark.parametrize("block", NOT_RUN, ids=lambda block: block.place)
def test_a_block_that_is_not_run_is_shell_and_names_options_that_there_are(block: Block) -> None:
    for command in commands_of(block):
        text = block.text if block.language == "sh" else command
        done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
        assert done.returncode == 0, f"{block.place}: {done.stderr}"
        check_words(words_of(command), block.place)


@pytest.mark.parametrize(("place", "command"), INLINE, ids=[f"{place}-{text[:40]}" for place, text in INLINE])
def test_a_command_within_a_sentence_names_options_that_there_are(place: str, command: str) -> None:
    check_words(words_of(command.replace(" ...", "")), place)


def words_of(command: str) -> list[str]:
    """The words of one command line; [] for one that another line completes, as a here-document's are."""
    try:
        return shlex.split(command, comments=True)
    except ValueError:
        return []


def check_words(words: list[str], place: str) -> None:
    """Fail when `kvredis` in `words` is given a subcommand or an option that it has not, or JSON is none."""
    for word in words:
        if word.startswith("{") and '"' in word:
            json.loads(word)
    while words and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*|sudo|env", words[0], re.DOTALL):
        words = words[1:]
    if words[:1] == ["kvredis"]:
        wrong = wrong_options(words[1:])
        assert wrong == "", f"{place}: kvredis {' '.join(words[1:])}: {wrong}"


def wrong_options(words: list[str]) -> str:
    """What click has against these words after `kvredis`, as far as it can tell without running them; "" if nothing."""
    command: click.Command | None = main
    context = click.Context(main, info_name="kvredis")
    stop = next((at for at, word in enumerate(words) if word in ("&", "|", "&&", ";", ">", "2>&1")), len(words))
    words = words[:stop]
    while isinstance(command, click.Group):
        if not words or words[0] == "--help":
            return ""
        name, words = words[0], words[1:]
        if re.fullmatch(r"[A-Z_]+|<.*>", name):  # a word that stands for any of them
            return ""
        command = command.get_command(context, name)
        if command is None:
            return f"there is no {name}"
        context = click.Context(command, info_name=name, parent=context)
    assert command is not None
    try:
        command.make_parser(context).parse_args(list(words))
    except click.UsageError as error:
        return error.format_message()
    return ""


@pytest.mark.parametrize(
    "words", ["serve --max-local-cpu-sise 5GB", "config sow", "bench server --no-such", "nosuch", "plan --shape"]
)
def test_the_check_of_options_finds_what_is_wrong(words: str) -> None:
    assert wrong_options(words.split()) != ""


def test_no_block_starts_a_server_in_the_background_or_writes_outside_of_its_folder() -> None:
    # The stage returns from `kvredis serve` when it is ready; with & the next line would come before that.
    lines = [(block.place, command) for block in BLOCKS if block.runs for command in commands_of(block)]
    assert [each for each in lines if re.match(r"kvredis serve\b.*&$", each[1]) or "/tmp/" in each[1]] == []


def test_every_block_says_what_it_is_and_only_what_would_run_says_why_it_does_not() -> None:
    assert [block.place for block in BLOCKS if block.language not in LANGUAGES] == []
    assert [block.place for block in BLOCKS if block.reason and block.language not in RUN] == []


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_no_code_hides_in_an_indented_block(page: Path) -> None:
    assert [(line, text) for line, text in prose_of(page) if text.startswith("    ")] == []


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.language in ("yaml", "json")], ids=lambda block: block.place)
def test_yaml_and_json_blocks_are_such(block: Block) -> None:
    assert (yaml.safe_load if block.language == "yaml" else json.loads)(block.text) is not None


def test_ports_are_replaced_whole() -> None:
    assert rewritten("6379 16379 :6379/0 63790", {"6379": "1"}) == "1 16379 :1/0 63790"


def test_an_expected_line_with_dots_fits_anything_and_one_without_only_itself() -> None:
    assert re.fullmatch(as_pattern("a ... c\n"), "a b\nb c")
    assert not re.fullmatch(as_pattern("a.c"), "abc")
