"""Sockets and threads below the protocol: listeners, TLS, io threads, replies without a copy. The server and its
clients import it; it knows no command."""
