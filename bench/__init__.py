"""Measurements through public interfaces only: every arm starts its servers, verifies every byte and says the
machine."""
