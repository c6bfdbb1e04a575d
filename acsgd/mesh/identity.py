"""Who a host is: keys, certificates and virtual addresses of the hosts of a run.

The run has a certificate authority whose key follows from the run's secret and name. So whoever has the secret can
sign a certificate, and nobody else can. The key of a host is new whenever it starts, and is never written to a disk. No
clock is trusted: certificates do not expire, and end with the process that has the key.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from acsgd.comm.addresses import VIRTUAL

MIN_SECRET_BYTES = 16
"""A stranger who connects sees a signature by a key that follows from the secret, and may try secrets at leisure."""
NEW_SECRET = "(umask 077; openssl rand -hex 24 > secret)"
_VALID = datetime.datetime(2020, 1, 1), datetime.datetime(2100, 1, 1)


class StrangerError(ConnectionError):
    """The process at the other end has no certificate of this run, or not that of the expected host."""


def check_secret(secret: bytes) -> bytes:
    """Return a secret. Raises ValueError if it is too short."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(
            f"the secret of the run has {len(secret)} bytes, and needs {MIN_SECRET_BYTES}: a shorter one can be found "
            f"by trying; make one with {NEW_SECRET}, and give all hosts the same"
        )
    return secret


def read_secret(path: Path) -> bytes:
    """Return the secret in a file that only this user can read. Raises OSError, ValueError."""
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & 0o077:
            raise ValueError(f"{path} can be opened by other users (mode {mode:04o}): chmod 600 {path}")
        return file.read().strip()


@dataclass(frozen=True)
class VerifiedHost:
    """A host whose certificate was verified."""

    address: str
    """Virtual address."""
    key: str
    """Digest of its public key."""
    name: str
    """Host name, as it says itself."""


class HostIdentity:
    """The key, the certificate and the virtual address of this host. secret: of the run; run: its name."""

    def __init__(self, secret: bytes, run: str) -> None:
        self._run = run
        self._key = Ed25519PrivateKey.generate()
        self.address = _address_of(self._key.public_key())
        self.key = _digest(self._key.public_key()).hex()
        self._authorities: dict[bytes, Ed25519PrivateKey] = {}
        """By secret, those whose certificates are accepted."""
        self.set_secrets(secret)

    def set_secrets(self, secret: bytes, *others: bytes) -> None:
        """Have a certificate of a secret from now on, and accept those of this and of other secrets."""
        self._authorities = {each: self._authorities.get(each) or self._derive(each) for each in (secret, *others)}
        self.secrets = tuple(self._authorities)
        """The secret of this host, and the others that are accepted."""
        self._authority = self._authorities[secret]
        certificate = self.sign(self._key.public_key(), self.address, socket.gethostname()[:64])
        self.server = self._context(ssl.PROTOCOL_TLS_SERVER, self._key, certificate)
        self.client = self._context(ssl.PROTOCOL_TLS_CLIENT, self._key, certificate)

    def secret_of(self, transport: asyncio.BaseTransport) -> bytes | None:
        """Return the secret that the other end of a connection has proved.

        None if it is not accepted any more, or if the connection is closing: asyncio may have forgotten it then.
        """
        if transport.is_closing():
            return None
        der = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        issuer = x509.load_der_x509_certificate(der).issuer
        return next((secret for secret, each in self._authorities.items() if _name_of(each) == issuer), None)

    def _derive(self, secret: bytes) -> Ed25519PrivateKey:
        # slow on purpose: see MIN_SECRET_BYTES
        salt = b"acsgd mesh " + self._run.encode()
        seed = hashlib.scrypt(check_secret(secret), salt=salt, n=2**14, r=8, p=1, dklen=32)
        return Ed25519PrivateKey.from_private_bytes(seed)

    def sign(self, key: Ed25519PublicKey, address: str, name: str) -> x509.Certificate:
        """Return a certificate for a key with a virtual address, by the authority of the secret of this host."""
        names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.IPv4Address(address))])
        return _certificate(self._authority, key, _common_name(name or "host"), names)

    def _context(self, role: int, key: Ed25519PrivateKey, certificate: x509.Certificate) -> ssl.SSLContext:
        context = ssl.SSLContext(role)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # `member_of` compares the virtual address
        context.verify_mode = ssl.CERT_REQUIRED
        for each in self._authorities.values():
            authority = _certificate(each, each.public_key(), _name_of(each), None)
            context.load_verify_locations(cadata=authority.public_bytes(Encoding.DER))
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        descriptor = os.memfd_create("certificate")  # ssl takes a key from a file alone
        with os.fdopen(descriptor, "wb") as file:
            file.write(private + certificate.public_bytes(Encoding.PEM))
            file.flush()
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        if role == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session is resumed: each connection is authenticated
        return context


def member_of(connection: ssl.SSLObject | ssl.SSLSocket, expected: str | None = None) -> VerifiedHost:
    """Return the host at the other end of a connection whose handshake is complete.

    expected: its virtual address; None = any. Raises StrangerError if the certificate is not for the address that
    follows from its key, or not for the expected one.
    """
    der = connection.getpeercert(binary_form=True)
    if der is None:
        raise StrangerError("no certificate")
    certificate = x509.load_der_x509_certificate(der)
    key = certificate.public_key()
    if not isinstance(key, Ed25519PublicKey):
        raise StrangerError("a key of another kind")
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    address = _address_of(key)
    if [str(each) for each in names.get_values_for_type(x509.IPAddress)] != [address]:
        raise StrangerError("a certificate for an address that does not follow from its key")
    if expected not in (None, address):
        raise StrangerError(f"{address} is there, and {expected} was expected")
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return VerifiedHost(address, _digest(key).hex(), str(name.value))


def _certificate(
    authority: Ed25519PrivateKey, key: Ed25519PublicKey, subject: x509.Name, names: x509.SubjectAlternativeName | None
) -> x509.Certificate:
    """Return a certificate by an authority. names: of a host; None = of the authority itself."""
    builder = x509.CertificateBuilder(_name_of(authority), subject, key, x509.random_serial_number(), *_VALID)
    builder = builder.add_extension(x509.BasicConstraints(names is None, None), critical=True)
    if names is not None:
        builder = builder.add_extension(names, critical=False)
    return builder.sign(authority, None)


def _name_of(authority: Ed25519PrivateKey) -> x509.Name:
    """Return the name of an authority: OpenSSL looks for the issuer of a certificate by it."""
    return _common_name(f"acsgd mesh {_digest(authority.public_key()).hex()[:32]}")


def _common_name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _digest(key: Ed25519PublicKey) -> bytes:
    return hashlib.sha256(key.public_bytes(Encoding.Raw, PublicFormat.Raw)).digest()


def _address_of(key: Ed25519PublicKey) -> str:
    digest = _digest(key)
    return f"{VIRTUAL}{digest[0]}.{digest[1]}"
