"""Sizes as users write them: LMCache's bare GiB, redis.conf's units, and words that name what is wrong."""

import pytest

from kvredis.storage.errors import ConfigError
from kvredis.storage.memory.arena import HugepageMode
from kvredis.storage.options import StoreOptions, parse_size

GIB = 1024**3


def size(value: str | int | float) -> int:
    """Parse as the configuration does."""
    return parse_size(value, key="max_local_cpu_size", source="test")


@pytest.mark.parametrize(
    ("written", "nbytes"),
    [
        (5.0, 5 * GIB),
        (5, 5 * GIB),
        ("5", 5 * GIB),
        ("5.0", 5 * GIB),
        (0.5, GIB // 2),
        (".5", GIB // 2),
        ("1e-3", int(0.001 * GIB)),
        ("5GB", 5 * GIB),
        ("5g", 5 * GIB),
        (" 5 GiB ", 5 * GIB),
        ("512mb", 512 * 1024**2),
        ("512MiB", 512 * 1024**2),
        ("5Gi", 5 * GIB),
        ("512Mi", 512 * 1024**2),
        ("64k", 65536),
        ("64KB", 65536),
        ("1.5kib", 1536),
        ("1tb", 1024**4),
        ("4096b", 4096),
    ],
)
def test_a_size_means_its_bytes(written: str | int | float, nbytes: int) -> None:
    assert size(written) == nbytes


@pytest.mark.parametrize(
    "garbage", ["", "abc", "5 pounds", "nan", "inf", "1_000", "5GB!", "0x10", "5 5", True, "GB", "5ib"]
)
def test_garbage_is_an_error_that_names_key_value_and_source(garbage: str | bool) -> None:
    with pytest.raises(ConfigError, match="not a size") as caught:
        size(garbage)
    assert str(caught.value).startswith("test: max_local_cpu_size: ")
    assert repr(garbage) in str(caught.value)


@pytest.mark.parametrize("small", [0, 0.0, "0", "0GB", -1, "-1", "-5GB", "-.5", "1e-30"])
def test_a_size_that_is_not_positive_is_refused(small: str | float) -> None:
    with pytest.raises(ConfigError, match="greater than 0"):
        size(small)


@pytest.mark.parametrize("huge", ["1e30", "1e400", "999999999tb", 1e300])
def test_a_size_beyond_the_address_space_is_refused(huge: str | float) -> None:
    with pytest.raises(ConfigError, match="more than a machine can address"):
        size(huge)


def test_float_infinity_and_nan_are_refused() -> None:
    for value in (float("inf"), float("nan")):
        with pytest.raises(ConfigError):
            size(value)


def test_store_options_default_to_the_best_pages_and_leave_them_untouched() -> None:
    options = StoreOptions(GIB)
    assert (options.hugepages, options.cache_policy) == (HugepageMode.AUTO, "LRU")
    assert (options.prefault_threads, options.page_lock) == (0, False)
