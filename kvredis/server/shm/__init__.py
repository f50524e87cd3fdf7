"""Clients on the same host: the arena they map, the leases they hold, the memory they lend, and KV.LANE to
KV.REVOKE. The server and its clients import it."""
