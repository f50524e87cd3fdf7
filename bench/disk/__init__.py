"""`kvredis bench disk`: the disk tier beside fio and a plain loop, GETs from disk, PINGs while it spills. The
command line imports it."""
