"""One client: its session, how a command of it is processed, why it may be blocked, what it may receive and hold.
The server and commands import it."""
