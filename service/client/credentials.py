"""What a client shows a server, and how it knows that it is the right one."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

import grpc

from pageturner.service.errors import InvalidArgument

Metadata = tuple[tuple[str, str], ...]

_PRINTABLE = re.compile(r"[!-~]+")


class CredentialOptions(TypedDict, total=False):
    """The fields of `Credentials`, as keywords of a client."""

    token: str
    token_file: str | Path
    tls: bool
    tls_ca: str | Path
    client_certificate: str | Path
    client_key: str | Path


@dataclass(frozen=True, slots=True)
class Credentials:
    """A bearer token, and the files of an encrypted connection. Raises InvalidArgument naming the field.

    Without TLS a token can be overheard on its way: for a server of this machine, or behind a proxy of it
    that encrypts.
    """

    token: str = field(default="", repr=False)
    """As `pageturner tokens new` printed it."""
    token_file: str | Path | None = None
    """Where the token is, in place of token: read for each call, so that another may be put there."""
    tls: bool = False
    """Encrypt, and trust the authorities that gRPC brings; the other files imply it."""
    tls_ca: str | Path | None = None
    """The authorities that the server's certificate is checked by, in PEM form."""
    client_certificate: str | Path | None = None
    """The client's own certificate, in PEM form."""
    client_key: str | Path | None = None
    """The key of the client's certificate."""

    def __post_init__(self) -> None:
        if not isinstance(self.token, str) or (self.token and not _PRINTABLE.fullmatch(self.token)):
            raise InvalidArgument("token", "is not of printable ASCII characters without spaces")
        if self.token and self.token_file is not None:
            raise InvalidArgument("token_file", "is given beside token; give one of them")
        for name, other in (("client_certificate", "client_key"), ("client_key", "client_certificate")):
            if getattr(self, name) is not None and getattr(self, other) is None:
                raise InvalidArgument(name, f"needs {other} too")

    @property
    def is_encrypted(self) -> bool:
        """Whether the connection is."""
        return self.tls or self.tls_ca is not None or self.client_certificate is not None

    def metadata(self) -> Metadata:
        """Of each call. Raises InvalidArgument for a token's file that can't be read, or holds none."""
        token = self.token if self.token_file is None else self._token_of_file()
        return (("authorization", f"Bearer {token}"),) if token else ()

    def _token_of_file(self) -> str:
        content = _read("token_file", self.token_file) or b""
        text = content.decode("ascii", "replace").strip()
        if not _PRINTABLE.fullmatch(text):
            raise InvalidArgument("token_file", f"{self.token_file} holds no token")
        return text

    def of_channel(self) -> grpc.ChannelCredentials | None:
        """The files are read for each connection that is made anew. None for plain text.

        Raises InvalidArgument, naming the field, for a file that can't be read, or holds something else: gRPC
        would say no more than that a handshake failed.
        """
        if not self.is_encrypted:
            return None
        return grpc.ssl_channel_credentials(
            _read_pem("tls_ca", self.tls_ca, b"CERTIFICATE"),
            _read_pem("client_key", self.client_key, b"PRIVATE KEY"),
            _read_pem("client_certificate", self.client_certificate, b"CERTIFICATE"),
        )


DEADLINE_KEY = "pageturner-deadline-seconds"
"""Of a call's metadata: its time limit once more, of which a proxy on the way (Ray Serve's) tells nobody."""


def call_metadata(credentials: Credentials, timeout_seconds: float | None) -> Metadata:
    """What goes along with a call: who makes it, and how long it may take. Raises InvalidArgument."""
    limit = () if timeout_seconds is None else ((DEADLINE_KEY, f"{timeout_seconds:.3f}"),)
    return (*credentials.metadata(), *limit)


def given_credentials(credentials: Credentials | None, options: CredentialOptions) -> Credentials:
    """Those that a client was given in either way. Raises InvalidArgument, also where it was both."""
    if credentials is None:
        return Credentials(**options)
    if options:
        raise InvalidArgument(next(iter(options)), "is given beside credentials; give one of them")
    return credentials


def _read(name: str, path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgument(name, f"{path} cannot be read: {error.strerror}") from error


def _read_pem(name: str, path: str | Path | None, kind: bytes) -> bytes | None:
    """kind: what the PEM block's label ends with."""
    content = _read(name, path)
    if content is not None and not re.search(rb"-----BEGIN [A-Z0-9 ]*\b" + kind + rb"-----", content):
        raise InvalidArgument(name, f"{path} holds no {kind.decode().lower()} in PEM form")
    return content
