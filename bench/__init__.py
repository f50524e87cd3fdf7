"""Measurements through public doors only: every arm starts its servers, verifies every byte and says the machine."""
