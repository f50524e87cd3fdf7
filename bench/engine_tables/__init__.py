"""`kvredis bench prefill`, `hit-sweep` and `long-prefill`: prompts computed and loaded from each tier. The command
line imports it."""
