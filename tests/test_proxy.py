"""The proxy that stands for a bad network: what it lets through is what was sent, unless it says otherwise."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.proxy import HOST, Proxy

BOUND_S = 30


class Echo:
    """A server that sends back what it gets."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address: tuple[str, int] = self._listener.getsockname()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(BOUND_S)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._serve, args=(client,)))
            self._threads[-1].start()

    def _serve(self, client: socket.socket) -> None:
        with client:
            try:
                while data := client.recv(1 << 16):
                    client.sendall(data)
            except OSError:
                return


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    """A proxy in front of an echo."""
    echo = Echo()
    with Proxy(echo.address) as made:
        yield made
    echo.close()


def connected(proxy: Proxy) -> socket.socket:
    return socket.create_connection((HOST, proxy.port), BOUND_S)


def received(client: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer when the other side ends the connection."""
    got = b""
    while len(got) < nbytes and (data := client.recv(nbytes - len(got))):
        got += data
    return got


def test_what_is_sent_arrives_both_ways_and_is_counted(proxy: Proxy) -> None:
    sent = bytes(range(256)) * 1000
    with connected(proxy) as client:
        threading.Thread(target=client.sendall, args=(sent,)).start()
        assert received(client, len(sent)) == sent
    assert proxy.passed_bytes["up"] == len(sent)
    assert proxy.connections == 1


def test_a_hung_connection_answers_after_the_given_bytes_no_more_until_it_is_healed(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.hang(after_bytes=3)
        client.sendall(b"abcdef")
        assert received(client, 3) == b"abc"
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        client.settimeout(BOUND_S)
        proxy.heal()
        assert received(client, 3) == b"def"


def test_a_new_connection_hangs_as_well(proxy: Proxy) -> None:
    proxy.hang()
    with connected(proxy) as client:
        client.sendall(b"abc")
        client.settimeout(0.1)
        with pytest.raises(TimeoutError):
            client.recv(1)
    assert proxy.passed_bytes["down"] == 0


def test_connections_are_cut_in_the_middle_and_new_ones_too_until_it_is_healed(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.cut(after_bytes=3)
        client.sendall(b"abcdef")
        assert received(client, 6) == b"abc"
    with connected(proxy) as client:
        client.sendall(b"abc")
        assert ended(client)
    proxy.heal()
    with connected(proxy) as client:
        client.sendall(b"abc")
        assert received(client, 3) == b"abc"
        proxy.cut()
        assert ended(client)


def ended(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_answers_are_garbage_once_they_are_corrupted(proxy: Proxy) -> None:
    with connected(proxy) as client:
        proxy.corrupt(after_bytes=2)
        client.sendall(b"abc")
        assert received(client, 3) == b"ab" + bytes([ord("c") ^ 0xFF])
        proxy.heal()
        client.sendall(b"abc")
        assert received(client, 3) == b"abc"


def test_a_throttled_direction_takes_its_time_until_the_throttle_ends(proxy: Proxy) -> None:
    sent = bytes(100_000)
    with connected(proxy) as client:
        proxy.throttle(down=200_000)
        began_s = time.monotonic()
        client.sendall(sent)
        assert received(client, len(sent)) == sent
        assert time.monotonic() - began_s > 0.4
        proxy.throttle(down=1)
        client.sendall(sent)
        proxy.heal()
        began_s = time.monotonic()
        assert received(client, len(sent)) == sent
        assert time.monotonic() - began_s < BOUND_S / 2


def test_a_client_of_a_server_that_is_gone_is_hung_up_on() -> None:
    with socket.create_server((HOST, 0)) as gone:
        address = gone.getsockname()
    with Proxy(address) as proxy, connected(proxy) as client:
        assert ended(client)
