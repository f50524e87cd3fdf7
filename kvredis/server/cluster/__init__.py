"""One node of a cluster: hash slots, the topology file, redirections, and the CLUSTER command. The server and its
clients import it."""
