"""kvredis whose Tab key waits for its server as long as a busy machine may need, so that a test sees the answer."""

from kvredis.cli.inspect import key_options
from kvredis.cli.main import main

if __name__ == "__main__":
    key_options.__dict__["COMPLETION_S"] = 30.0
    main(prog_name="kvredis")
