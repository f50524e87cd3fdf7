"""The RESP client: sockets, TLS, wire, Sentinel and Redis Cluster's slots. The remote backend, benches and the
command line import it; it knows no blocks."""
