"""The server that speaks RESP: it parses, asks the Store and lends the Store's bytes to sockets."""
