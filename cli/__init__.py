"""The shell: one module per `kvredis` subcommand, plus main that gathers them."""
