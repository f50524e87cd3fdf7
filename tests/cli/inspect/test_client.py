"""Every way in which a server cannot be asked, met for real where it can be: one line each, that says what to do."""

import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from kvredis.backends.config.url import Address
from kvredis.cli.inspect.client import mapped
from kvredis.cli.inspect.errors import told
from tests.backends.topologies import KvredisCluster, Sentinels
from tests.cli.inspected import ROOT, connected, free_port, plain_redis, run, serving
from tests.server.certificates import Papers


@pytest.fixture(scope="module")
def open_server() -> Iterator[str]:
    with serving() as address:
        yield address


@pytest.fixture(scope="module")
def locked() -> Iterator[str]:
    """A server with a password, and a user who may read but not say INFO."""
    with serving("--requirepass", "sesame") as address:
        with connected(address, "sesame") as client:
            client.acl_setuser("reader", enabled=True, passwords=["+word"], categories=["+@read"], keys=["*"])
        yield address


def line(*words: str, env: dict[str, str] | None = None, stdin: str | None = None) -> str:
    """The one line of a command that failed."""
    result = run(*words, env=env, stdin=stdin)
    assert result.exit_code == 1, result.output
    assert result.stdout == ""
    (one,) = [each for each in result.stderr.splitlines() if not each.startswith("Password: ")]
    return one.removeprefix("kvredis: ")


def test_a_number_alone_is_a_port_of_this_machine(open_server: str) -> None:
    port = open_server.rpartition(":")[2]
    assert run("ls", "-u", port, "--keys").exit_code == 0
    assert f"nothing listens at redis://127.0.0.1:{(other := free_port())}" in line("ls", "-u", str(other))


@contextmanager
def saying(answer: bytes) -> Iterator[str]:
    """Something on a port that answers so whenever it hears something; nothing: it hangs up then."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_each() -> None:
            with suppress(OSError):  # the listener is shut, or who had called is gone
                while True:
                    link, _ = listener.accept()
                    with link, suppress(OSError):
                        while (heard := link.recv(4096)) and answer:
                            link.sendall(answer * max(heard.count(b"\r\n*") + heard.startswith(b"*"), 1))

        thread = threading.Thread(target=answer_each, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.mark.parametrize(
    "command", [["ls"], ["meta", "k"], ["get", "k"], ["rm", "k"], ["prefetch", "k"], ["top", "--once"]]
)
def test_no_server_listens(command: list[str]) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    assert line(*command, "-u", url) == (
        f"nothing listens at {url}: is `kvredis serve` running? (another address: -u URL)"
    )


def test_no_socket_no_host(tmp_path: Path) -> None:
    assert line("ls", "-u", f"unix://{tmp_path}/kv.sock") == (
        f"there is no socket {tmp_path}/kv.sock: is `kvredis serve --unixsocket {tmp_path}/kv.sock` running?"
    )
    assert line("ls", "-u", "redis://nobody.invalid").startswith("no host of that name: redis://nobody.invalid:6379")


def test_a_password_is_wanted_wrong_or_too_much(locked: str, open_server: str) -> None:
    assert line("ls", "-u", f"redis://{locked}") == (
        f"redis://{locked} wants a password: put it into the URL, or give --askpass, or set REDISCLI_AUTH"
    )
    assert line("ls", "-u", f"redis://:wrong@{locked}") == (
        f"redis://:***@{locked} refuses this user and password: check the URL, --user, --askpass or REDISCLI_AUTH"
    )
    assert line("ls", "-u", f"redis://:needless@{open_server}") == (
        f"redis://:***@{open_server} has no password, and one was given: leave it out (URL, --askpass, REDISCLI_AUTH)"
    )


def test_a_password_comes_by_url_variable_or_prompt(locked: str) -> None:
    for words, env, stdin in (
        (["-u", f"redis://:sesame@{locked}"], {}, None),
        (["-u", f"redis://{locked}"], {"REDISCLI_AUTH": "sesame"}, None),
        (["-u", f"redis://{locked}", "--askpass"], {}, "sesame\n"),
        (["-u", f"redis://{locked}", "--user", "default"], {}, "sesame\n"),
    ):
        result = run("ls", *words, "--keys", env=env, stdin=stdin)
        assert result.exit_code == 0, result.output
        assert "sesame" not in result.output


def test_a_user_who_may_not_ask_everything_is_told_what(locked: str) -> None:
    url = f"redis://reader:word@{locked}"
    assert run("meta", "-u", url, "none").stderr == f"kvredis: redis://reader:***@{locked} has no key none\n"
    assert line("rm", "-u", url, "k").startswith(f"redis://reader:***@{locked}: k is not deleted: ")
    assert "lives on" in line("top", "--once", "-u", url)
    seen = run("ls", "-u", url)
    assert (seen.exit_code, seen.stderr) == (0, ""), "who may not ask INFO sees the tree without the version"
    with connected(locked, "sesame") as client:
        client.acl_setuser("watcher", enabled=True, passwords=["+word"], commands=["+info", "+kv.tiers"])
    told = json.loads(
        run("top", "--once", "--json", "--interval", "0.1", "-u", f"redis://watcher:word@{locked}").stdout
    )
    assert (told["prefixes"], told["prefixes_complete"]) == ([], False), "who may not look at keys sees the rest"


def test_the_server_is_that_of_the_configuration_where_no_option_names_one(open_server: str, tmp_path: Path) -> None:
    with connected(open_server) as client:
        client.set("here", "1")
    config = tmp_path / "kv.yaml"
    config.write_text(f"remote_url: kvredis://{open_server}\n")
    for words, env in (
        ([], {"LMCACHE_REMOTE_URL": f"redis://{open_server}"}),
        ([], {"LMCACHE_CONFIG_FILE": str(config)}),
        (["--config-file", str(config)], {}),
        (["-u", open_server], {}),
    ):
        assert run("ls", "--keys", *words, env=env).stdout == "here\n"


def test_a_url_that_is_none_is_bad_usage() -> None:
    result = run("ls", "-u", "ftp://127.0.0.1")
    assert result.exit_code == 2
    assert result.stderr.startswith("kvredis: -u: url: want redis://HOST:PORT")


def test_a_web_server_is_called_one() -> None:
    class Quiet(http.server.BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # it would log into the command's stderr
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Quiet) as web:
        thread = threading.Thread(target=web.serve_forever)
        thread.start()
        try:
            url = f"redis://127.0.0.1:{web.server_port}"
            assert line("ls", "-u", url) == (
                f"{url} is a web server, not a Redis server: is that kvredis' metrics_port? Redis clients use `port`"
            )
        finally:
            web.shutdown()
            thread.join(10)


def test_plain_where_tls_is_spoken_and_tls_where_it_is_not(papers: Papers, open_server: str) -> None:
    files = ("--tls-cert-file", papers.path("server"), "--tls-key-file", papers.path("server_key"))
    port = str(free_port())
    with serving("--port", "none", "--tls-port", port, *files, "--tls-auth-clients", "no", port=False) as address:
        assert line("ls", "-u", f"redis://{address}") == (
            f"redis://{address} speaks TLS: try rediss:// instead of redis://"
        )
        assert "ssl_ca_certs=FILE" in line("ls", "-u", f"rediss://{address}")
        good = run("ls", "--keys", "-u", f"rediss://{address}?ssl_ca_certs={papers.path('ca')}")
        assert good.exit_code == 0, good.output
    assert line("ls", "-u", f"rediss://{open_server}") == (
        f"rediss://{open_server} does not speak TLS: try redis:// instead of rediss://"
    )


def test_a_silent_server_is_waited_for_as_long_as_was_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"redis://127.0.0.1:{listener.getsockname()[1]}"
        assert line("ls", "-u", url, "--timeout", "0.2").startswith(f"{url} does not answer in time: ")


@pytest.mark.parametrize(
    ("answer", "start"),
    [
        (b"-LOADING Redis is loading the dataset in memory\r\n", "{} is still loading its data"),
        (b"-READONLY You can't write against a read only replica.\r\n", "{} is a read-only replica"),
        (b"-OOM command not allowed when used memory > 'maxmemory'.\r\n", "{} has no room"),
        (b"-CLUSTERDOWN Hash slot not served\r\n", "the cluster of {} is down"),
        (b"-MOVED 12539 10.0.0.7:6380\r\n", "that key is on 10.0.0.7:6380: use -u redis://10.0.0.7:6380, or the whole"),
        (b"-ERR unknown command 'GET'\r\n", "{} does not know GET: "),
        (b"-ERR max number of clients reached\r\n", "{} has as many clients as it takes"),
        (b"", "{} hangs up: is it a Redis server?"),
        (b"-ERR of \x1b[2J a kind\r\n", "{}: of \\x1b[2J a kind"),
        (b"220 mail.example ESMTP\r\n", "{} is no Redis server: it answered '220 mail.example ESMTP"),
    ],
)
def test_what_a_server_answers_is_explained(answer: bytes, start: str) -> None:
    with saying(answer) as address:
        assert line("get", "-u", f"redis://{address}", "k").startswith(start.format(f"redis://{address}"))


def test_a_key_of_another_node_is_said_where_it_is_and_the_whole_cluster_finds_it(tmp_path: Path) -> None:
    with KvredisCluster() as cluster:
        assert run("put", "-u", cluster.url, "--raw", __file__, "key").exit_code == 0
        refused = [run("get", "--raw", "-u", f"redis://127.0.0.1:{node.port}", "key") for node in cluster.nodes]
        answers = [result.stderr for result in refused if result.exit_code]
        assert len(answers) == 2
        assert all("that key is on 127.0.0.1:" in answer for answer in answers)
        url = answers[0].split("the whole cluster, -u ")[1].strip()
        assert run("get", "--raw", "-u", url, "key", "-o", str(tmp_path / "k")).exit_code == 0
        once = json.loads(run("top", "-u", url, "--once", "--json", "--interval", "0.1").stdout)
        assert once["tiers"]["memory"]["entries"] == 1
    assert line("ls", "-u", url).startswith(f"nothing listens at {url}: ")


def test_a_server_that_is_no_cluster_is_said_to_be_none(open_server: str) -> None:
    assert line("ls", "-u", f"redis-cluster://{open_server}") == (
        f"redis-cluster://{open_server} is no cluster: try redis:// instead of redis-cluster://"
    )


def test_a_master_is_found_through_its_sentinels() -> None:
    with Sentinels() as sentinels:
        assert run("put", "-u", sentinels.url, "--raw", __file__, "key").exit_code == 0
        assert run("ls", "-u", sentinels.url, "--keys").stdout == "key\n"


def test_a_plain_redis_does_what_it_can(tmp_path: Path) -> None:
    with plain_redis(tmp_path) as url:
        assert run("put", "-u", url, "--raw", __file__, "k").exit_code == 0
        assert run("get", "-u", url, "--raw", "k", "-o", str(tmp_path / "k")).exit_code == 0
        assert (tmp_path / "k").read_bytes() == Path(__file__).read_bytes()
        assert run("ls", "-u", url, "--keys").stdout == "k\n"
        assert run("top", "-u", url, "--once", "--interval", "0.1").exit_code == 0
        assert run("rm", "-u", url, "k").exit_code == 0


def test_maps_of_both_protocols_are_read_alike() -> None:
    assert mapped([b"a", b"x", b"b", 2]) == mapped({b"a": b"x", b"b": 2}) == {"a": "x", "b": 2}


def test_an_unforeseen_trouble_is_told_in_its_own_words() -> None:
    assert told(RuntimeError("odd"), Address()) == "redis://127.0.0.1:6379: odd"
    assert told(RuntimeError(), Address()) == "redis://127.0.0.1:6379: RuntimeError"


@pytest.mark.parametrize(
    ("words", "closed", "code", "said"),
    [
        ("get --raw key", ">&-", 2, "standard output is closed: name a file with -o FILE"),
        ("put - other", "<&-", 2, "standard input is closed: name a FILE"),
        ("rm --match k*", "<&-", 2, "1 key match k*: --yes deletes them without a question"),
        ("ls --keys", ">&-", 0, ""),
        ("top --json --once --interval 0.1", "<&- >&-", 0, ""),
    ],
)
def test_a_standard_stream_that_is_closed_is_said_or_does_no_harm(
    open_server: str, words: str, closed: str, code: int, said: str
) -> None:
    with connected(open_server) as client:
        client.set("key", "value")
    done = subprocess.run(
        ["bash", "-c", f'exec "$@" {closed}', "bash", sys.executable, "-m", "kvredis", *words.split(),
         "-u", f"redis://{open_server}"],
        cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
