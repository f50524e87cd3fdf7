"""`kvredis bench slow-remote`: an engine behind a slow link. The command line imports it."""
