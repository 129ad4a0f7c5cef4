"""The server's certificate, and the authority of its clients': read, checked, and replaced while it serves.

gRPC asks for the certificate anew at each handshake. So a connection sees the one in force when it began, and
those that stand go on. What gRPC would take and every client refuse is refused here, with the reason.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc
from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key
from structlog.typing import FilteringBoundLogger

from pageturner.service.errors import ConfigError
from pageturner.service.rpc.options import TlsOptions
from pageturner.service.watched_files import WatchedFiles, unheard, warn_of_readers

WARN_DAYS = 21.0
"""Before a certificate ends: time to find out why nothing has renewed it."""

WARN_EVERY_SECONDS = 86_400.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """What is in force. configuration: as gRPC wants it. kind: of its key. ends: of the chain, the first."""

    configuration: grpc.ServerCertificateConfiguration
    subject: str
    fingerprint: str
    kind: str
    ends: dt.datetime

    @property
    def is_common(self) -> bool:
        """Whether each gRPC client can verify what is signed with its key."""
        return self.kind in ("RSA", "secp256r1", "secp384r1")


class Certificates:
    """The files of the options, read at the start and whenever they change.

    Files with a fault are refused together and logged; those in force stay. now: seconds of the epoch.
    Raises ConfigError at the first reading.
    """

    def __init__(
        self,
        options: TlsOptions,
        logger: FilteringBoundLogger,
        now: Callable[[], float],
        on_refused: Callable[[], object] = unheard,
    ) -> None:
        self._on_refused = on_refused
        self._options = options
        self._logger = logger
        self._now = now
        self._files = WatchedFiles(*options.files)
        self._current = read_certificate(options, now())
        self._reading = asyncio.Lock()
        self._warned_at = float("-inf")
        self._report("certificate", "start")

    @property
    def current(self) -> Certificate:
        """What the next connection will be shown."""
        return self._current

    @property
    def wants_client_certificate(self) -> bool:
        """Whether a client without one of a trusted authority is refused."""
        return self._options.wants_client_certificate

    def server_credentials(self) -> grpc.ServerCredentials:
        """For one address: gRPC keeps apart, for each, whether it has been given the certificate in force."""
        given = self._current

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """In a thread of gRPC's, at the begin of each handshake. None: the same as the last time."""
            nonlocal given
            current = self._current
            if current is given:
                return None
            given = current
            return current.configuration

        return grpc.dynamic_ssl_server_credentials(
            given.configuration,
            fetch,  # type: ignore[arg-type] # None is no change, as its docstring says
            require_client_authentication=self._options.wants_client_certificate,
        )

    async def reload(self, origin: str) -> None:
        """Read the files now. origin: who asked, for the log."""
        async with self._reading:  # so that what is read last is what stays
            self._files.note()
            try:
                self._current = await asyncio.to_thread(read_certificate, self._options, self._now())
            except ConfigError as error:
                ends, reason = self._current.ends.isoformat(), str(error)
                self._logger.error("certificate_refused", origin=origin, reason=reason, in_force_until=ends)
                self._on_refused()
                return
        self._report("certificate_reloaded", origin)

    async def poll(self) -> None:
        """Reload if a file has changed since it was last read; once a day, warn of an end that is near."""
        if self._files.have_changed():
            await self.reload(f"change of {self._options.certificate}, its key or tls.client_ca")
        self._warn_of_end()

    def _report(self, event: str, origin: str) -> None:
        current = self._current
        self._logger.info(
            event,
            origin=origin,
            subject=current.subject,
            sha256=current.fingerprint,
            ends=current.ends.isoformat(),
        )
        assert self._options.key is not None, "it was read"
        warn_of_readers("key_readable", self._options.key, self._logger)
        if not current.is_common:
            reason = "gRPC clients of Python and C++ know RSA, P-256 and P-384 keys alone"
            self._logger.warning("certificate_uncommon", kind=current.kind, reason=reason)
        self._warned_at = float("-inf")
        self._warn_of_end()

    def _warn_of_end(self) -> None:
        now = self._now()
        days = (self._current.ends.timestamp() - now) / 86_400
        if days > WARN_DAYS or now - self._warned_at < WARN_EVERY_SECONDS:
            return
        self._warned_at = now
        self._logger.warning("certificate_ends", days=round(days, 1), ends=self._current.ends.isoformat())


def read_certificate(options: TlsOptions, now: float) -> Certificate:
    """Raises ConfigError naming the option whose file is at fault."""
    assert options.certificate is not None, "TLS is on"
    assert options.key is not None, "TLS is on"
    chain_pem = _read("tls.certificate", options.certificate)
    key_pem = _read("tls.key", options.key)
    chain = _certificates("tls.certificate", options.certificate, chain_pem)
    _check_times(options.certificate, chain, now)
    _check_key(options.key, key_pem, chain[0])
    ca_pem = None
    if options.client_ca is not None:
        ca_pem = _read("tls.client_ca", options.client_ca)
        _certificates("tls.client_ca", options.client_ca, ca_pem)
    return Certificate(
        grpc.ssl_server_certificate_configuration([(key_pem, chain_pem)], ca_pem),
        chain[0].subject.rfc4514_string(),
        chain[0].fingerprint(hashes.SHA256()).hex(),
        _kind_of(chain[0]),
        min(each.not_valid_after_utc for each in chain),
    )


def _read(option: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(option, f"{path} cannot be read: {error.strerror}") from error


def _certificates(option: str, path: Path, pem: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError as error:
        raise ConfigError(option, f"{path} holds no certificates in PEM form") from error


def _kind_of(certificate: x509.Certificate) -> str:
    """`RSA`, the name of an elliptic curve, or that of another kind of key."""
    match certificate.public_key():
        case EllipticCurvePublicKey(curve=curve):
            return curve.name
        case RSAPublicKey():
            return "RSA"
        case other:
            return type(other).__name__.removesuffix("PublicKey")


def _check_times(path: Path, chain: list[x509.Certificate], now: float) -> None:
    for each in chain:
        subject = each.subject.rfc4514_string()
        if each.not_valid_after_utc.timestamp() <= now:
            reason = f"{path}: {subject} has expired, on {each.not_valid_after_utc.isoformat()}"
            raise ConfigError("tls.certificate", reason)
        if each.not_valid_before_utc.timestamp() > now:
            reason = f"{path}: {subject} is not valid before {each.not_valid_before_utc.isoformat()}"
            raise ConfigError("tls.certificate", f"{reason}; is the clock right?")


def _check_key(path: Path, pem: bytes, certificate: x509.Certificate) -> None:
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError as error:
        raise ConfigError("tls.key", f"{path} is encrypted; gRPC takes no passphrase") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError("tls.key", f"{path} holds no private key in PEM form") from error
    form = (Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if key.public_key().public_bytes(*form) != certificate.public_key().public_bytes(*form):
        raise ConfigError("tls.key", f"{path} is not the key of the first certificate in tls.certificate")
