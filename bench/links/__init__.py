"""`kvredis bench links`: what copies between any two places of this machine. The command line imports it."""
