"""`kvredis bench slow-remote`: a cache behind a link slower than computing, and the proxy that makes it so. The
command line imports it."""
