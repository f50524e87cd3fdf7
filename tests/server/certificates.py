"""Keys and certificates, made when a test wants them and never kept: two authorities, and what they have signed."""

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

PASSWORD = "opensesame"


@dataclass(frozen=True)
class Papers:
    """Files in a folder. `ca` has signed server and client, `other_ca` the stranger; `locked_key` wants PASSWORD."""

    folder: Path

    def path(self, name: str) -> str:
        """The path of one file, as an option has it."""
        return str(self.folder / f"{name}.pem")

    def options(self, **more: Any) -> dict[str, Any]:
        """What a server with TLS on a free port and on no other is started with."""
        files = {"tls_cert_file": "server", "tls_key_file": "server_key", "tls_ca_cert_file": "ca"}
        return {"port": -1, "tls_port": -1, **{key: self.path(name) for key, name in files.items()}, **more}

    def client_context(self, show: str | None = "client") -> ssl.SSLContext:
        """What a client needs that trusts `ca` and shows the certificate `show`."""
        context = ssl.create_default_context(cafile=self.path("ca"))
        if show is not None:
            context.load_cert_chain(self.path(show), self.path(f"{show}_key"))
        return context


def make_papers(folder: Path) -> Papers:
    """Write all files."""
    papers = Papers(folder)
    for authority, names in (("ca", ("server", "client")), ("other_ca", ("stranger",))):
        issuer_key, issuer = _sign(authority, None, None)
        _write(papers, authority, issuer_key, issuer)
        for name in names:
            _write(papers, name, *_sign(name, issuer_key, issuer.subject))
    key = serialization.load_pem_private_key(Path(papers.path("server_key")).read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    locked = serialization.BestAvailableEncryption(PASSWORD.encode())
    Path(papers.path("locked_key")).write_bytes(_pem(key, locked))
    both = Path(papers.path("server")).read_bytes() + Path(papers.path("server_key")).read_bytes()
    Path(papers.path("server_and_key")).write_bytes(both)
    return papers


def _sign(
    name: str, issuer_key: ec.EllipticCurvePrivateKey | None, issuer: x509.Name | None
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Make a key and a certificate for it; without an issuer that of an authority, signed by itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"kvredis test {name}")])
    now = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)
    signer = issuer_key or key
    identifier = x509.SubjectKeyIdentifier.from_public_key
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer or subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - hour)
        .not_valid_after(now + hour)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(identifier(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is None:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        builder = builder.add_extension(usage, critical=True)
    else:
        here = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = builder.add_extension(x509.SubjectAlternativeName(here), critical=False)
    return key, builder.sign(signer, hashes.SHA256())


def _write(papers: Papers, name: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    Path(papers.path(name)).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    Path(papers.path(f"{name}_key")).write_bytes(_pem(key, serialization.NoEncryption()))


def _pem(key: ec.EllipticCurvePrivateKey, encryption: serialization.KeySerializationEncryption) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, encryption)
