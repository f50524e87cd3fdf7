"""`kvredis demo`: KV that is computed once, stored and loaded. The table of subcommands names command.py; run.py
alone loads torch and transformers."""
