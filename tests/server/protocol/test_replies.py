"""Encoders: the exact bytes in both protocols, and payloads that stay views."""

from dataclasses import dataclass

from kvredis.server.protocol import replies


@dataclass
class Peer:
    resp: int


TWO, THREE = Peer(2), Peer(3)


def test_small_replies_have_the_bytes_of_the_protocol() -> None:
    assert replies.integer(0) == b":0\r\n"
    assert replies.integer(-2) == b":-2\r\n"
    assert replies.integer(10**12) == b":1000000000000\r\n"
    assert replies.bulk("é") == b"$2\r\n\xc3\xa9\r\n"
    assert replies.bulk(b"") == b"$0\r\n\r\n"
    assert replies.simple("RESET") == b"+RESET\r\n"


def test_an_error_cannot_break_the_stream() -> None:
    assert replies.error(b"ERR a\r\nb") == b"-ERR a  b\r\n"


def test_maps_sets_and_texts_follow_the_clients_protocol() -> None:
    pairs: list[tuple[replies.Reply, replies.Reply]] = [(replies.bulk("a"), replies.ONE)]
    assert replies.map_reply(TWO, pairs) == b"*2\r\n$1\r\na\r\n:1\r\n"
    assert replies.map_reply(THREE, pairs) == b"%1\r\n$1\r\na\r\n:1\r\n"
    assert replies.set_reply(TWO, [replies.ONE]) == b"*1\r\n:1\r\n"
    assert replies.set_reply(THREE, [replies.ONE]) == b"~1\r\n:1\r\n"
    assert replies.verbatim(TWO, "hé") == b"$3\r\nh\xc3\xa9\r\n"
    assert replies.verbatim(THREE, "hé") == b"=7\r\ntxt:h\xc3\xa9\r\n"


def test_a_payload_goes_through_an_array_as_the_same_view() -> None:
    view = memoryview(bytearray(100))
    reply = replies.array([replies.ONE, replies.payload(view), replies.ZERO, replies.ZERO])
    assert isinstance(reply, list)
    assert any(part is view for part in reply)
    assert replies.joined(reply) == b"*4\r\n:1\r\n$100\r\n" + bytes(100) + b"\r\n:0\r\n:0\r\n"


def test_an_array_of_plain_replies_is_plain_bytes() -> None:
    nested = replies.array([replies.bulks([b"a", "b"]), replies.EMPTY_ARRAY])
    assert nested == b"*2\r\n*2\r\n$1\r\na\r\n$1\r\nb\r\n*0\r\n"
