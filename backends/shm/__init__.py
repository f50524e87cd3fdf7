"""Shared memory with a server on the same host: discovery, the mapped arena, leases and lent buffers. The remote
backend imports it."""
