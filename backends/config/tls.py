"""How a client's TLS is asked for in a URL, and the context that it makes: in one place, so that clients check alike.

The options are redis-py's, letter by letter, for that is how users of Redis write them. What is not asked for is safe:
the server must show a certificate that the system's authorities have signed, for the host name that we call.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from typing import Final

from kvredis.storage.errors import BackendError

TLS_OPTIONS: Final = (
    "ssl_cert_reqs",
    "ssl_ca_certs",
    "ssl_certfile",
    "ssl_keyfile",
    "ssl_password",
    "ssl_check_hostname",
)
_VERIFY: Final = {"required": True, "optional": True, "none": False}
_FLAGS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


@dataclass(frozen=True, slots=True)
class Tls:
    """What a server must show us, and what we show it: paths of PEM files, none of them opened before `context`."""

    verify: bool = True
    check_hostname: bool = True
    ca_certs: str = ""
    certfile: str = ""
    keyfile: str = ""
    password: str = field(default="", repr=False)

    @classmethod
    def of(cls, options: dict[str, str]) -> Tls:
        """Read URL options, all of them out of TLS_OPTIONS. Raises ValueError with the reason, which tells no password.

        `ssl_cert_reqs` may be "optional", and means "required" then: to a client, who always asks, OpenSSL makes no
        difference between the two.
        """
        verify = _word(options, "ssl_cert_reqs", _VERIFY, True)
        check = _word(options, "ssl_check_hostname", _FLAGS, verify)
        tls = cls(verify, check, *(options.get(name, "") for name in TLS_OPTIONS[1:5]))
        if check and not verify:
            raise ValueError("ssl_check_hostname=true wants a certificate: leave out ssl_cert_reqs=none")
        if not tls.certfile and (tls.keyfile or tls.password):
            raise ValueError("ssl_keyfile and ssl_password want ssl_certfile beside them")
        return tls

    def context(self) -> ssl.SSLContext:
        """Read the files. Raises BackendError that names the option at fault; never asks a terminal for a password.

        Made anew for each connection, so that a renewed certificate is used without a restart.
        """
        try:
            context = ssl.create_default_context(cafile=self.ca_certs or None)
        except OSError as error:  # of which ssl.SSLError is one
            raise BackendError(f"ssl_ca_certs={self.ca_certs}: {told(error)}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = self.check_hostname  # first: it may not be on without verification
        context.verify_mode = ssl.CERT_REQUIRED if self.verify else ssl.CERT_NONE
        if self.certfile:
            try:
                context.load_cert_chain(self.certfile, self.keyfile or None, lambda: self.password)
            except (OSError, ValueError) as error:
                names = f"ssl_certfile={self.certfile}" + (f", ssl_keyfile={self.keyfile}" if self.keyfile else "")
                raise BackendError(f"{names}: {told(error)}") from error
        return context

    def redis_options(self) -> dict[str, str | bool | None]:
        """Say the same as keyword arguments of redis-py's clients, which find servers for us."""
        return {
            "ssl": True,
            "ssl_cert_reqs": "required" if self.verify else "none",
            "ssl_check_hostname": self.check_hostname,
            "ssl_ca_certs": self.ca_certs or None,
            "ssl_certfile": self.certfile or None,
            "ssl_keyfile": self.keyfile or None,
            "ssl_password": self.password or None,
        }


def told(error: Exception) -> str:
    """Say in plain words what OpenSSL or the system says with numbers and places in its source."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the server's certificate is refused: {error.verify_message.rstrip('.')}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").replace("_", " ").lower()
        return {"wrong version number": "it does not speak TLS"}.get(reason, f"TLS: {reason or error}")
    return str(getattr(error, "strerror", None) or error)


def _word(options: dict[str, str], name: str, meanings: dict[str, bool], absent: bool) -> bool:
    if name not in options:
        return absent
    meant = meanings.get(options[name].lower())
    if meant is None:
        raise ValueError(f"{name} must be one of {', '.join(meanings)}, not {options[name]!r}")
    return meant
