"""TLS for the listeners, made from file names: a context that speaks 1.2 and 1.3 and checks clients' certificates.

WHY so many checks: OpenSSL says "PEM lib" of nearly everything, and asks for a password on the terminal when it wants
one. Here each file is tried by itself, so that what is wrong names the key of the configuration that is at fault, and
it is said before the server is ready.
"""

import ssl

from kvredis.server.options import TLS_PROTOCOLS, ServerOptions
from kvredis.storage.errors import ConfigError

OPTION = "option"
"""The source in a ConfigError of ours; a caller that knows the true one (file and line) replaces it."""

_VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}
_AUTH = {"yes": ssl.CERT_REQUIRED, "optional": ssl.CERT_OPTIONAL, "no": ssl.CERT_NONE}


def make_context(options: ServerOptions) -> ssl.SSLContext:
    """Read certificate, key and authorities. Raises ConfigError with the key at fault; never asks a terminal."""
    if options.tls_cert_file is None:
        raise ConfigError("tls_cert_file", None, OPTION, "tls_port needs a certificate")
    if options.tls_auth_clients != "no" and options.tls_ca_cert_file is None:
        reason = "clients are asked for certificates, so say whose to trust, or set tls_auth_clients to no"
        raise ConfigError("tls_ca_cert_file", None, OPTION, reason)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.options |= ssl.OP_NO_RENEGOTIATION
    wanted = [_VERSIONS[name] for name in TLS_PROTOCOLS if name in options.tls_protocols]
    if not wanted:
        raise ConfigError("tls_protocols", options.tls_protocols, OPTION, "want one of " + ", ".join(TLS_PROTOCOLS))
    context.minimum_version, context.maximum_version = wanted[0], wanted[-1]
    if options.tls_ciphers is not None:
        try:
            context.set_ciphers(options.tls_ciphers)
        except ssl.SSLError as error:
            raise ConfigError("tls_ciphers", options.tls_ciphers, OPTION, f"OpenSSL: {_told(error)}") from None
    _load_authorities(context, "tls_cert_file", options.tls_cert_file, into=None)
    _load_key(context, options, options.tls_cert_file)
    if options.tls_ca_cert_file is not None:
        _load_authorities(context, "tls_ca_cert_file", options.tls_ca_cert_file, into=context)
    context.verify_mode = _AUTH[options.tls_auth_clients]
    return context


def _load_authorities(context: ssl.SSLContext, key: str, path: str, into: ssl.SSLContext | None) -> None:
    """Read certificates `into` a context; None only tries whether the file holds any."""
    _readable(key, path)
    try:
        (into or ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)).load_verify_locations(cafile=path)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(key, path, OPTION, f"no certificate in PEM format: {_told(error)}") from None


def _load_key(context: ssl.SSLContext, options: ServerOptions, cert: str) -> None:
    key = options.tls_key_file
    name, path = ("tls_cert_file", cert) if key is None else ("tls_key_file", key)
    _readable(name, path)
    asked = False

    def password() -> str:
        nonlocal asked
        asked = True
        return options.tls_key_file_pass

    try:
        context.load_cert_chain(cert, key, password)
    except (ssl.SSLError, OSError, ValueError) as error:
        if asked:
            missing = "the key is encrypted" if not options.tls_key_file_pass else "it does not open the key"
            raise ConfigError("tls_key_file_pass", "***", OPTION, f"{missing} ({path})") from None
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(name, path, OPTION, f"the key does not fit the certificate {cert}") from None
        raise ConfigError(name, path, OPTION, f"no key in PEM format: {_told(error)}") from None


def _readable(key: str, path: str) -> None:
    try:
        with open(path, "rb"):
            pass
    except (OSError, ValueError) as error:
        raise ConfigError(key, path, OPTION, f"cannot be read: {_told(error)}") from None


def _told(error: Exception) -> str:
    """What an error says, without its number."""
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error.args[-1])
