"""`kvredis doctor`: one file for each part of the machine it looks at. The table of subcommands names it."""
