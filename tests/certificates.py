"""Certificates for tests: an authority and a server that it vouches for, as RFC 5280 has them.

Python 3.13 and later refuse certificates without key identifiers.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

_PEM = serialization.Encoding.PEM


def certificates(*names: x509.GeneralName) -> tuple[bytes, bytes]:
    """Returns the certificate of an authority, and that of a server with these names, followed by its key."""
    authority, served = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    usage = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    above = _signed(
        "authority", authority, authority, x509.BasicConstraints(ca=True, path_length=None), usage
    )
    below = _signed("server", served, authority, x509.SubjectAlternativeName(names))
    key = served.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return above, below + key


def _signed(
    of: str, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey, *critical: x509.ExtensionType
) -> bytes:
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, of)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "authority")]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(by.public_key()), critical=False)
    )
    for extension in critical:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(by, hashes.SHA256()).public_bytes(_PEM)
