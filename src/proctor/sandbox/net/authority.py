"""A certificate authority for one sandbox, where TLS has to end at the boundary (rules on methods and paths, secrets,
services, HTTP faults). It exists only then; its key never leaves this process, and what it signs is believed in that
sandbox alone.
"""

from __future__ import annotations

import datetime
import os
import ssl
from collections import OrderedDict

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LEAVES_MAX = 256
_YEARS = datetime.timedelta(days=3650)
"""Valid long before and after now: programs under test set their clocks back."""


class Authority:
    """Signs certificates for the names that a sandbox visits."""

    def __init__(self, label: str = "sandbox") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._leaf_key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Proctor"),
                x509.NameAttribute(NameOID.COMMON_NAME, f"Proctor boundary of {label}"[:64]),
            ]
        )
        self._certificate = self._sign_root()
        self._contexts: OrderedDict[str, ssl.SSLContext] = OrderedDict()

    @property
    def pem(self) -> str:
        """The authority's certificate: what the sandbox must trust."""
        return self._certificate.public_bytes(serialization.Encoding.PEM).decode("ascii")

    def context(self, name: str) -> ssl.SSLContext:
        """A server's context that shows a certificate for `name` and speaks HTTP/1.1 only."""
        context = self._contexts.get(name)
        if context is None:
            context = self._make_context(name)
            self._contexts[name] = context
            while len(self._contexts) > _LEAVES_MAX:
                self._contexts.popitem(last=False)
        self._contexts.move_to_end(name)
        return context

    def _make_context(self, name: str) -> ssl.SSLContext:
        key = self._leaf_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        pem = self.leaf(name).public_bytes(serialization.Encoding.PEM)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # The only way in is a file; this one is in memory and has no name.
        descriptor = os.memfd_create("leaf", os.MFD_CLOEXEC)
        try:
            os.write(descriptor, key + pem + self.pem.encode("ascii"))
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        finally:
            os.close(descriptor)
        return context

    def leaf(self, name: str) -> x509.Certificate:
        """A certificate for `name`."""
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])
        builder = self._builder(subject, self._leaf_key.public_key())
        builder = (
            builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(_usage(signs_certificates=False), critical=True)
        )
        return builder.sign(self._key, hashes.SHA256())

    def _sign_root(self) -> x509.Certificate:
        builder = self._builder(self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        return builder.sign(self._key, hashes.SHA256())

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _YEARS)
            .not_valid_after(now + _YEARS)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
        )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def upstream_context(trust: str | None) -> ssl.SSLContext:
    """A client's context: the machine's own roots and, where a policy names more, those. Speaks HTTP/1.1 only."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    if trust is not None:
        context.load_verify_locations(cadata=trust)
    return context
