"""Copies between an engine's paged KV and blocks in host memory. The paged mover imports it; it knows no backend and
no engine."""
