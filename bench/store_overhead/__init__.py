"""`kvredis bench store-overhead`: what storing costs an engine that prefills. The command line imports it."""
