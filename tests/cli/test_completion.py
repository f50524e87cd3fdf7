"""`kvredis completion`, and the Tab key's answers as the shells ask for them."""

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvredis.cli.inspect import key_options
from kvredis.cli.inspect.get import get

from .conftest import ROOT
from .inspected import connected, free_port, run, serving

ODD = (
    "star*",
    "stay",
    "with blank",
    "with;reboot",
    "with|sh",
    "with>file",
    "with&",
    "with!!",
    "with(x)",
    "with,comma",
    "with{a,b}",
    "-with",
)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as address, connected(address) as client:
        client.mset({f"key:{number}": "x" for number in range(5)} | dict.fromkeys(ODD, "x"))
        yield f"redis://{address}"


def offered(words: str, at: int) -> list[str]:
    """What bash is offered for the word number `at`, counted from 0."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cli.unhurried"],
        cwd=ROOT,
        env={"_KVREDIS_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(at), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines() if line]


def test_keys_of_the_server_are_offered(url: str) -> None:
    assert offered(f"kvredis get -u {url} key:", 4) == [f"key:{number}" for number in range(5)]
    assert offered(f"kvredis meta -u {url} key:1 key:2", 5) == ["key:2"]


def test_a_pattern_in_a_word_is_a_word_and_what_would_need_quotes_is_not_offered(url: str) -> None:
    assert offered(f"kvredis get -u {url} sta", 4) == ["star*", "stay"]
    assert offered(f"kvredis get -u {url} with", 4) == [], "no shell runs what a client has called a key"
    assert offered(f"kvredis get -u {url} -w", 4) == []


def test_subcommands_options_and_choices_are_offered() -> None:
    assert offered("kvredis pre", 1) == ["prefetch"]
    assert offered("kvredis ls --sor", 2) == ["--sort"]
    assert offered("kvredis ls --sort h", 3) == ["hits"]


def test_the_tab_key_does_not_wait_for_a_server_that_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(key_options, "_ask", lambda url, incomplete, found: over.wait())
    try:
        ctx = get.make_context("get", ["-u", "redis://silent"], resilient_parsing=True)
        assert key_options.KeyName().shell_complete(ctx, get.params[0], "k") == []
    finally:
        over.set()


def test_a_server_that_is_down_or_none_offers_nothing_and_says_nothing() -> None:
    assert offered(f"kvredis get -u redis://127.0.0.1:{free_port()} k", 4) == []
    assert offered("kvredis get -u nonsense://x k", 4) == []


@pytest.mark.parametrize(
    ("shell", "file"), [("bash", "~/.bashrc"), ("zsh", "~/.zshrc"), ("fish", "~/.config/fish/completions/kvredis.fish")]
)
def test_the_lines_say_where_they_belong_and_load_what_script_prints(shell: str, file: str) -> None:
    lines = run("completion", shell).stdout.splitlines()
    assert lines[0].startswith("#")
    assert file in lines[0]
    assert f"_KVREDIS_COMPLETE={shell}_source kvredis" in lines[-1]
    script = run("completion", shell, "--script").stdout
    assert f"_KVREDIS_COMPLETE={shell}_complete" in script


def test_the_lines_for_bash_are_bash(tmp_path: Path) -> None:
    path = tmp_path / "script"
    path.write_text(run("completion", "bash", "--script").stdout + "\n" + run("completion", "bash").stdout)
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, check=False, timeout=60).returncode == 0


def in_bash(folder: Path, typed: bytes, before: str = "") -> list[str]:
    """The words that `kvredis` gets when this is typed into a bash with our lines; its words go to the file `words`."""
    stub = folder / "kvredis"
    script = f"{sys.executable} -m kvredis completion bash --script"
    stub.write_text(
        f"""#!/bin/sh
case "$_KVREDIS_COMPLETE" in
bash_source) cd '{ROOT}' && {script} ;;
bash_complete) printf '%s|%s\\n' "$COMP_WORDS" "$COMP_CWORD" > '{folder}/asked'; echo 'plain,{KEY}' ;;
*) printf '%s\\n' "$@" > '{folder}/words' ;;
esac
"""
    )
    stub.chmod(0o755)
    (folder / "bashrc").write_text(before + run("completion", "bash").stdout)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "TERM": "dumb", "HOME": str(folder)}
    ours, its = os.openpty()
    with subprocess.Popen(
        ["bash", "--noprofile", "--rcfile", str(folder / "bashrc"), "-i"],
        stdin=its, stdout=its, stderr=its, env=env, cwd=folder, start_new_session=True,
    ) as bash:  # fmt: skip
        os.close(its)
        os.write(ours, typed + b'\nshopt -p hostcomplete > settings; echo "$COMP_WORDBREAKS" >> settings\nexit\n')
        with contextlib.suppress(OSError):  # EIO: bash has ended
            while os.read(ours, 4096):
                pass
        os.close(ours)
        assert bash.wait(60) == 0
    return (folder / "words").read_text().split()


KEY = "kvredis:model@f00d@{0@ab}cd"


@pytest.mark.parametrize(
    "before", ["", 'shopt -u hostcomplete; COMP_WORDBREAKS="${COMP_WORDBREAKS//[:@]/}"\n', "COMP_WORDBREAKS=' \t\n:'\n"]
)
@pytest.mark.parametrize("part", ["kv", "kvredis:", "kvredis:mo", "kvredis:model@", "kvredis:model@f"])
def test_a_key_with_colons_and_at_signs_is_one_word_whatever_bashs_settings_are(
    tmp_path: Path, part: str, before: str
) -> None:
    assert in_bash(tmp_path, f"kvredis get {part}\t".encode(), before) == ["get", KEY]
    assert (tmp_path / "asked").read_text() == f"kvredis get {part}|2\n"


def test_bashs_own_settings_are_as_they_were(tmp_path: Path) -> None:
    in_bash(tmp_path, b"kvredis get kv\t")
    said = (tmp_path / "settings").read_text()
    assert said.startswith("shopt -s hostcomplete\n")
    assert ":" in said
    assert "@" in said


def test_an_unknown_shell_is_bad_usage() -> None:
    assert run("completion", "tcsh").exit_code == 2
