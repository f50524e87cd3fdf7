"""CLIENT TRACKING, CACHING, GETREDIR and TRACKINGINFO: what they take, refuse and show."""

from kvredis.server.client.tracking import PREFIXES_MAX
from kvredis.server.server import Server
from tests.server.fake_session import FakeSession

OK = b"+OK\r\n"
SYNTAX = b"-ERR syntax error\r\n"
BCAST_STAYS = (
    b"-ERR You can't switch BCAST mode on/off before disabling tracking for this client, and then re-enabling "
)


def info(session: FakeSession) -> list[bytes]:
    """The words and numbers of TRACKINGINFO."""
    lines = session.ask("CLIENT TRACKINGINFO").split(b"\r\n")
    return [line for line in lines if line[:1] not in b"*%~$"]


def test_prefixes_add_up_as_long_as_none_covers_another(session: FakeSession) -> None:
    assert session.ask("CLIENT TRACKING on BCAST PREFIX b PREFIX a") == OK
    assert session.ask("CLIENT TRACKING on BCAST PREFIX ab") == (
        b"-ERR Prefix 'ab' overlaps with an existing prefix 'a'. Prefixes for a single client must not overlap.\r\n"
    )
    assert session.ask("CLIENT TRACKING on BCAST NOLOOP PREFIX c") == OK
    assert info(session) == [b"flags", b"on", b"bcast", b"noloop", b"redirect", b":0", b"prefixes", b"a", b"b", b"c"]
    assert session.server.tracking.prefixes.keys() == {b"a", b"b", b"c"}
    assert session.ask("CLIENT TRACKING off") == OK
    assert not session.server.tracking.prefixes


def test_the_number_of_prefixes_has_a_bound(session: FakeSession) -> None:
    half = [word for n in range(PREFIXES_MAX) for word in (b"PREFIX", b"%03d" % n)]
    assert session.ask([b"CLIENT", b"TRACKING", b"ON", b"BCAST", *half]) == OK
    assert session.ask("CLIENT TRACKING ON BCAST PREFIX x").startswith(b"-ERR a client may track")
    assert len(session.server.tracking.prefixes) == PREFIXES_MAX


def test_all_clients_look_again_when_the_first_begins_to_track_and_the_last_ends(server: Server) -> None:
    first, second = FakeSession(server, 1), FakeSession(server, 2)
    first.ask("CLIENT TRACKING on")
    assert (first.reconsidered, second.reconsidered) == (1, 1)
    second.ask("CLIENT TRACKING on")
    first.ask("CLIENT TRACKING off")
    assert second.reconsidered == 1
    second.ask("CLIENT TRACKING off")
    assert (first.reconsidered, second.reconsidered) == (2, 2)
    second.ask("CLIENT TRACKING off")
    assert second.reconsidered == 2
