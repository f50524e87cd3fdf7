"""Keyspace notifications: the letters of the setting. tests/compat compares what they let out with redis-server."""

import pytest

from kvredis.server.commands.keyspace_events import effective, normalize


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("KEA", "AKE"),
        ("", ""),
        ("lxEg", "glxE"),
        ("nmA", "Amn"),
        ("g$lshzxetd", "A"),
        ("KKK", "K"),
        ("detxzhsl$gEK", "AKE"),
        ("mK$", "$Km"),
    ],
)
def test_the_letters_are_shown_in_the_order_of_redis(written: str, shown: str) -> None:
    assert normalize(written) == shown


def test_a_letter_that_is_none_is_refused_in_the_words_of_redis() -> None:
    with pytest.raises(ValueError, match=r"^Invalid event class character\. Use 'Ag\$lshzxeKEtmdn'\.$"):
        normalize("KQ")


@pytest.mark.parametrize("letters", ["", "K", "KE", "A", "g$", "mn"])
def test_letters_that_name_no_class_or_no_place_are_as_good_as_none(letters: str) -> None:
    assert effective(letters) == ""
