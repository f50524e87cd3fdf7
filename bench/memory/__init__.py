"""`kvredis bench memory`: copies within one process, on each kind of page. The command line imports it, and other
benches take T0 from it."""
