"""`kvredis bench server`: kvredis, redis-server and memcached under one client. The command line imports it."""
