"""Authorities and certificates made in the test: real ones, on elliptic curves since those take no time."""

from __future__ import annotations

import datetime as dt
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
)
from cryptography.x509.oid import NameOID

from pageturner.service.rpc.options import TlsOptions

NOW = dt.datetime.now(dt.UTC)
SERVER_NAMES = ("localhost", "127.0.0.1")


Key = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate with its key."""

    certificate: x509.Certificate
    key: Key

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(Encoding.PEM)

    @property
    def fingerprint(self) -> str:
        return self.certificate.fingerprint(hashes.SHA256()).hex()

    def key_pem(self, passphrase: bytes | None = None) -> bytes:
        encryption = NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase)
        return self.key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def issue(
    subject: str,
    *names: str,
    by: Issued | None = None,
    begins: float = -1.0,
    ends: float = 365.0,
    is_authority: bool = False,
    key: Key | None = None,
) -> Issued:
    """names: alternative ones: hosts, addresses, URIs. by: itself if none. begins, ends: days from now."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    subject_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject_name)
        .issuer_name(by.certificate.subject if by else subject_name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + dt.timedelta(days=begins))
        .not_valid_after(NOW + dt.timedelta(days=ends))
        .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False
        )
    signing = by.key if by else key
    hash_kind = None if isinstance(signing, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return Issued(builder.sign(signing, hash_kind), key)


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def authority(name: str = "authority") -> Issued:
    return issue(name, is_authority=True)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server, which a test may write again."""

    folder: Path

    @property
    def options(self) -> TlsOptions:
        ca = self.folder / "client-ca.pem"
        return TlsOptions(self.folder / "server.pem", self.folder / "server.key", ca if ca.exists() else None)

    def write(self, server: Issued, client_ca: Issued | None = None) -> TlsFiles:
        self._replace("server.pem", server.pem)
        self._replace("server.key", server.key_pem())
        if client_ca is not None:
            self._replace("client-ca.pem", client_ca.pem)
        return self

    def _replace(self, name: str, content: bytes) -> None:
        """By a new file, of another inode."""
        path = self.folder / f"{name}.new"
        path.touch(mode=0o600)
        path.write_bytes(content)
        path.replace(self.folder / name)


def secure_channel(port: int, ca: Issued, client: Issued | None = None) -> grpc.aio.Channel:
    credentials = grpc.ssl_channel_credentials(
        ca.pem, *((client.key_pem(), client.pem) if client is not None else (None, None))
    )
    # Each with a connection of its own.
    options = (("grpc.use_local_subchannel_pool", 1),)
    return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


def shown_certificate(port: int) -> str:
    """The fingerprint of what a new connection is shown. Blocks."""
    pem = ssl.get_server_certificate(("127.0.0.1", port), timeout=30)
    return x509.load_pem_x509_certificate(pem.encode()).fingerprint(hashes.SHA256()).hex()
