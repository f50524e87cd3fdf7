"""The stage on which pages are played: it must see what fails, and leave nothing behind."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import stage
from tests.docs.blocks import ROOT, Block, blocks_of, exchanges, inline_commands, prose_of
from tests.docs.stage import play

PAGE = """\
# A page

Say `kvredis config show`.

```yaml title="kv.yaml"
chunk_size: 128
```

<!-- not run: there is
no such thing -->
```sh
no-such-command
```

```sh
LMCACHE_CONFIG_FILE=kv.yaml kvredis config show | grep 'chunk_size .*128'
HERE=exported
```

```console
$ echo $HERE \\
> twice
exported twice
$ false
```
"""


def page_of(text: str, folder: Path) -> list[Block]:
    page = folder / "page.md"
    page.write_text(text, encoding="utf-8")
    return [Block(ROOT / "page.md", b.line, b.language, b.text, b.title, b.reason, b.given) for b in blocks_of(page)]


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """An empty folder to play in."""
    folder = tmp_path / "room"
    folder.mkdir()
    return folder


@pytest.fixture(params=["own", "shared"])
def network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways to have ports: a network of one's own, and free ports in place of those that the page names."""
    stage.own_network.cache_clear()
    if request.param == "shared":
        monkeypatch.setenv("KVREDIS_DOCS_NETWORK", "shared")
    elif not stage.own_network():
        pytest.skip("the kernel lets us have no network of our own (unshare --net)")
    yield str(request.param)
    stage.own_network.cache_clear()


def test_blocks_share_one_shell_and_find_the_files_of_the_page(tmp_path: Path, room: Path) -> None:
    blocks = page_of(PAGE, tmp_path)
    assert [block.reason for block in blocks] == ["", "there is no such thing", "", ""]
    outcome = play(blocks, room)
    assert outcome.status == 0, outcome.output
    assert outcome.answers[3, 0] == (0, "exported twice\n")
    assert outcome.answers[3, 1][0] == 1


def test_a_command_that_fails_ends_the_page_and_is_named(tmp_path: Path, room: Path) -> None:
    outcome = play(page_of("```sh\ntrue\nfalse\necho not reached\n```\n", tmp_path), room)
    assert outcome.status == 1
    assert "::failed at page.md:1" in outcome.output
    assert "not reached" not in outcome.output


def test_a_server_is_waited_for_on_the_port_that_the_page_says_and_ends_with_it(
    tmp_path: Path, room: Path, network: str
) -> None:
    text = """\
```sh
kvredis serve
kvredis serve --port 7001
python -c "import socket; [socket.create_connection(('127.0.0.1', port), 5).close() for port in (6379, 7001)]"
```
"""
    outcome = play(page_of(text, tmp_path), room)
    assert outcome.status == 0, outcome.output
    if network == "own":
        assert "Ready to accept connections on 127.0.0.1:6379" in outcome.output
    process_ids = [int(path.read_text()) for path in (room / ".servers").glob("*.pid")]
    assert len(process_ids) == 2
    for process_id in process_ids:
        with pytest.raises(ProcessLookupError):
            os.kill(process_id, 0)


def test_a_server_that_does_not_start_fails_the_page_with_its_words(tmp_path: Path, room: Path) -> None:
    outcome = play(page_of("```sh\nkvredis serve --max-local-cpu-size nonsense\n```\n", tmp_path), room)
    assert outcome.status == 2
    assert "max_local_cpu_size" in outcome.output


def test_a_network_of_its_own_reaches_no_other_host(tmp_path: Path, room: Path) -> None:
    if not stage.own_network():
        pytest.skip("the kernel lets us have no network of our own (unshare --net)")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connect = f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 5)"
        outcome = play(page_of(f'```sh\npython -c "{connect}"\n```\n', tmp_path), room)
    assert outcome.status == 1
    assert "ConnectionRefusedError" in outcome.output


def test_what_is_read_out_of_markdown_is_blocks_sentences_and_commands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, encoding="utf-8")
    assert inline_commands(page) == [(3, "kvredis config show")]
    assert [text for _, text in prose_of(page) if text] == ["# A page", "Say `kvredis config show`."]
    assert exchanges(blocks_of(page)[-1]) == [("echo $HERE \\\ntwice", "exported twice"), ("false", "")]


def test_a_block_that_is_never_closed_is_an_error(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```sh\ntrue\n", encoding="utf-8")
    with pytest.raises(AssertionError, match="never closed"):
        blocks_of(page)
