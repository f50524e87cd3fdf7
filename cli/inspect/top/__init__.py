"""`kvredis top`: what it asks of a server, and how it draws that on a terminal. The table of subcommands names it."""
