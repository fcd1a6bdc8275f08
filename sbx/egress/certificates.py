"""The certificates that replace those of hosts whose TLS the proxy ends.

Each sandbox has one authority, in memory only. It can sign for the hosts that the policy of its
sandbox names and for no others (name constraints), so even its key would not open more.
"""

import datetime
import ipaddress
import os
import ssl
from functools import lru_cache
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from sbx.egress.hosts import is_address

_DAYS = 397  # clients accept no longer validity of a server
_CONTEXTS_MAX = 64  # a wildcard has any number of hosts


class Authority:
    """Makes certificates for the hosts of `patterns`."""

    def __init__(self, sandbox: str, patterns: tuple[str, ...]) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._server_key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"sbx {sandbox}"[:64])])
        self._certificate = self._own(patterns)
        self.context = lru_cache(_CONTEXTS_MAX)(self._context)

    @property
    def pem(self) -> bytes:
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def _own(self, patterns: tuple[str, ...]) -> x509.Certificate:
        builder = _dated(self._name, self._name, self._key.public_key())
        for extension, critical in (
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_usage(signs_certificates=True), True),
            (x509.NameConstraints([_constraint(pattern) for pattern in patterns], None), True),
            (x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())

    def _leaf(self, host: str) -> x509.Certificate:
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "sbx egress proxy")])
        builder = _dated(subject, self._name, self._server_key.public_key())
        for extension, critical in (
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (_usage(signs_certificates=False), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (x509.SubjectAlternativeName([_general(host)]), False),
            (x509.SubjectKeyIdentifier.from_public_key(self._server_key.public_key()), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ):
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())

    def _context(self, host: str) -> ssl.SSLContext:
        """Return a server's context for this host. OpenSSL reads keys from files only: this file is
        in memory, and has no name."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(["http/1.1"])
        key = self._server_key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        fd = os.memfd_create("sbx-egress", os.MFD_CLOEXEC)
        try:
            os.write(fd, key + self._leaf(host).public_bytes(serialization.Encoding.PEM))
            context.load_cert_chain(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)
        return context


def trusted() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def bundle(authority: Authority, outside: ssl.SSLContext) -> bytes:
    """Return the certificates to trust inside: the authority, and those that the host trusts,
    because the TLS of other hosts passes unchanged."""
    roots = [ssl.DER_cert_to_PEM_cert(root) for root in outside.get_ca_certs(binary_form=True)]
    return authority.pem + ("".join(roots).encode() or _of_directory())


def _of_directory() -> bytes:
    """Return the certificates of a host that keeps each one in a file, for OpenSSL to find."""
    directory = ssl.get_default_verify_paths().capath
    if directory is None:
        return b""
    files = sorted(Path(directory).glob("*.[0-9]"))
    return b"".join(file.read_bytes().rstrip() + b"\n" for file in files if file.is_file())


def _dated(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _general(host: str) -> x509.GeneralName:
    return x509.IPAddress(ipaddress.ip_address(host)) if is_address(host) else x509.DNSName(host)


def _constraint(pattern: str) -> x509.GeneralName:
    if is_address(pattern):
        return x509.IPAddress(ipaddress.ip_network(pattern))
    return x509.DNSName(pattern.removeprefix("*."))
