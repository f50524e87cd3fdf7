"""`kvredis bench` and its subcommands: options, progress and tables around what bench/ measures. The table of
subcommands names it."""
