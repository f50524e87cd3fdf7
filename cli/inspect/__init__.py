"""Subcommands that look into a running server: ls, meta, get, put, rm, prefetch, and the client they share. The
table of subcommands names them."""
