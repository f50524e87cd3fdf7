"""`kvredis demo`: a prompt of real text, computed once, stored and loaded. The table of subcommands names it; run.py
alone loads torch and transformers."""
