"""Servers that benches start begin as quickly as in tests/bench."""

from tests.bench import conftest

quick_start = conftest.quick_start
