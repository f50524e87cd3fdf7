"""`kvredis bench transport`: blocks between two processes, by pyzmq, RESP and shared memory. The command line
imports it."""
