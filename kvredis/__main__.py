"""`python -m kvredis`: the command line of this very interpreter, where no `kvredis` script is installed."""

from kvredis.cli.main import main

main(prog_name="kvredis")
