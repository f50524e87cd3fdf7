"""RESP as bytes: requests out of them, replies into them, arguments and glob patterns. Clients and commands import
it; it does no I/O."""
