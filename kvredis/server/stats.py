"""The door's counters: what INFO's stats, commandstats and errorstats sections and CONFIG RESETSTAT speak of."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class CommandStats:
    """One command's share. `nanoseconds` is the time in its handler and in gathering its reply."""

    calls: int = 0
    nanoseconds: int = 0
    rejected_calls: int = 0
    """Refused before the handler ran: arity, authentication."""
    failed_calls: int = 0
    """Answered with an error by the handler."""


@dataclass(slots=True)
class ServerStats:
    """Counts since start or since CONFIG RESETSTAT."""

    commands_processed: int = 0
    connections_received: int = 0
    connections_rejected: int = 0
    net_input_bytes: int = 0
    """Of clients that are gone: Server.traffic adds the connected ones."""
    net_output_bytes: int = 0
    error_replies: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    """Error replies by their first word."""
    commands: dict[str, CommandStats] = field(default_factory=dict)
    """By full command name, `client|id`."""

    def reset(self) -> None:
        """Back to zero, in place, because sessions hold on to this object."""
        fresh = ServerStats()
        for name in self.__slots__:
            setattr(self, name, getattr(fresh, name))

    def command(self, name: str) -> CommandStats:
        """The record of a command, a new one at its first call."""
        try:
            return self.commands[name]
        except KeyError:
            record = self.commands[name] = CommandStats()
            return record

    def count_error(self, reply: bytes) -> None:
        """Take note of an error reply that is about to be sent."""
        self.error_replies += 1
        code = reply[1:].split(None, 1)[0].decode("latin-1")
        if code in self.errors or len(self.errors) < 128:  # Redis' bound on errorstats
            self.errors[code] = self.errors.get(code, 0) + 1
