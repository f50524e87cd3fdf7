"""Settings of a running server: the table, checks, effects, CONFIG and SIGHUP. The server and the commands that
report settings import it."""
