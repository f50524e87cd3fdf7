"""CLIENT TRACKING, CACHING, GETREDIR and TRACKINGINFO: what they take, refuse and show."""

import pytest

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


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("CLIENT TRACKING maybe", "syntax error"),
        ("CLIENT TRACKING on FOO", "syntax error"),
        ("CLIENT TRACKING off FOO", "syntax error"),
        ("CLIENT TRACKING on REDIRECT", "syntax error"),
        ("CLIENT TRACKING on PREFIX", "syntax error"),
        ("CLIENT TRACKING on REDIRECT abc", "value is not an integer or out of range"),
        ("CLIENT TRACKING on REDIRECT 0", "The client ID you want redirect to does not exist"),
        ("CLIENT TRACKING off REDIRECT 99", "The client ID you want redirect to does not exist"),
        ("CLIENT TRACKING on REDIRECT 1 REDIRECT 1", "A client can only redirect to a single other client"),
        ("CLIENT TRACKING on PREFIX a", "PREFIX option requires BCAST mode to be enabled"),
        ("CLIENT TRACKING on OPTIN OPTOUT", "You can't specify both OPTIN mode and OPTOUT mode"),
        ("CLIENT TRACKING on BCAST OPTIN OPTOUT", "OPTIN and OPTOUT are not compatible with BCAST"),
        (
            "CLIENT TRACKING on BCAST PREFIX a PREFIX b PREFIX bc",
            "Prefix 'b' overlaps with another provided prefix 'bc'. Prefixes for a single client must not overlap.",
        ),
        ("CLIENT TRACKING", "wrong number of arguments for 'client|tracking' command"),
    ],
)
def test_a_wrong_line_is_refused_in_the_words_of_redis_and_changes_nothing(
    session: FakeSession, line: str, text: str
) -> None:
    assert session.ask(line) == f"-ERR {text}\r\n".encode()
    assert session.tracking is None


def test_the_way_of_tracking_changes_only_through_off(session: FakeSession) -> None:
    assert session.ask("CLIENT TRACKING on OPTIN") == OK
    assert session.ask("CLIENT TRACKING on OPTOUT").startswith(b"-ERR You can't switch OPTIN/OPTOUT mode before")
    assert session.ask("CLIENT TRACKING on BCAST").startswith(BCAST_STAYS)
    assert session.ask("CLIENT TRACKING on NOLOOP") == OK
    assert info(session) == [b"flags", b"on", b"noloop", b"redirect", b":0", b"prefixes"]
    assert session.ask("CLIENT TRACKING off") == OK
    assert session.ask("CLIENT TRACKING on BCAST") == OK
    assert session.ask("CLIENT TRACKING on").startswith(BCAST_STAYS)


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


def test_caching_chooses_only_where_there_is_a_choice(session: FakeSession) -> None:
    nothing = b"-ERR CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode "
    assert session.ask("CLIENT CACHING YES").startswith(nothing)
    session.ask("CLIENT TRACKING on OPTIN")
    assert session.ask("CLIENT CACHING maybe") == SYNTAX
    assert session.ask("CLIENT CACHING NO") == (
        b"-ERR CLIENT CACHING NO is only valid when tracking is enabled in OPTOUT mode.\r\n"
    )
    assert session.ask("CLIENT CACHING yes") == OK
    assert b"caching-yes" in info(session)
    session.ask("CLIENT TRACKING off")
    session.ask("CLIENT TRACKING on OPTOUT")
    assert session.ask("CLIENT CACHING YES") == (
        b"-ERR CLIENT CACHING YES is only valid when tracking is enabled in OPTIN mode.\r\n"
    )
    assert session.ask("CLIENT CACHING no") == OK
    assert b"caching-no" in info(session)


def test_trackinginfo_without_tracking(session: FakeSession) -> None:
    assert session.ask("CLIENT GETREDIR") == b":-1\r\n"
    assert info(session) == [b"flags", b"off", b"redirect", b":-1", b"prefixes"]
    session.speak(3)
    assert session.ask("CLIENT TRACKINGINFO") == (
        b"%3\r\n$5\r\nflags\r\n~1\r\n$3\r\noff\r\n$8\r\nredirect\r\n:-1\r\n$8\r\nprefixes\r\n*0\r\n"
    )


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
