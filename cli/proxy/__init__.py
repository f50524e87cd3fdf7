"""`kvredis proxy`: a router in front of engines that prefill and engines that decode. The table of subcommands names
command.py; router.py alone loads aiohttp."""
