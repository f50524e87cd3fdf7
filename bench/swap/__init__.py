"""`kvredis bench swap`: pages of a GPU to and from the host, in percent of the link. The command line imports it."""
