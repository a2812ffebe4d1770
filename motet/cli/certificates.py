"""Certificates for a private mesh: an authority, and certificates of the NATS server and the gateways.

    ca.crt  ca.key             the authority, valid ten years; only `ca.crt` leaves this directory
    nats.crt  nats.key         the NATS server
    gateway.crt  gateway.key   the gateways' https

Certificates that expire within `RENEW`, or lack a host, are renewed under the same authority, so clients need no change. The
services also accept certificates of other authorities, for example public ones.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from motet.cli.credentials import write_private

AUTHORITY = "Motet certificate authority"
LIFE_OF_CA = timedelta(days=3650)
LIFE = timedelta(days=825)  # what clients accept of a server at most
RENEW = timedelta(days=30)
HOSTS = ("localhost", "127.0.0.1", "::1")


def write(out: Path, hosts: Iterable[str] = ()) -> list[Path]:
    """Make missing files in `out`, for `hosts` besides this machine and the containers' names.

    Returns the files that services need: all but the authority's key. Raises ValueError for an invalid host.
    """
    authority, signer = _authority(out)
    needed = [out / "ca.crt"]
    for kind in ("nats", "gateway"):
        names = _names([kind, *HOSTS, *hosts])
        cert_path, key_path = out / f"{kind}.crt", out / f"{kind}.key"
        if not _good(cert_path, key_path, authority, names):
            key = ec.generate_private_key(ec.SECP256R1())
            cert = _signed(_builder(kind, authority.subject, LIFE, key).add_extension(names, critical=False), signer, authority)
            _write_key(key_path, key)
            write_private(cert_path, cert.public_bytes(serialization.Encoding.PEM).decode())
        needed += [cert_path, key_path]
    return needed


def _authority(out: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    cert_path, key_path = out / "ca.crt", out / "ca.key"
    if cert_path.exists() and key_path.exists():
        cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != cert.public_key():
            raise ValueError(f"{key_path} is not the key of {cert_path}: remove both to make new ones")
        if cert.not_valid_after_utc - datetime.now(UTC) > LIFE:
            return cert, key
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(AUTHORITY, subject, LIFE_OF_CA, key)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    cert = builder.sign(key, hashes.SHA256())
    _write_key(key_path, key)
    write_private(cert_path, cert.public_bytes(serialization.Encoding.PEM).decode())
    return cert, key


def _builder(name: str, issuer: x509.Name, life: timedelta, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))  # clocks differ
        .not_valid_after(now + life)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _signed(
    builder: x509.CertificateBuilder, signer: ec.EllipticCurvePrivateKey, authority: x509.Certificate
) -> x509.Certificate:
    known = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    builder = builder.add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(signer, hashes.SHA256())


def _names(hosts: Sequence[str]) -> x509.SubjectAlternativeName:
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys(hosts):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    return x509.SubjectAlternativeName(names)


def _good(cert_path: Path, key_path: Path, authority: x509.Certificate, names: x509.SubjectAlternativeName) -> bool:
    """Whether a certificate exists, is of this authority, has all names, and does not expire soon."""
    if not (cert_path.exists() and key_path.exists()):
        return False
    cert = x509.load_pem_x509_certificate(cert_path.read_bytes())
    has = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    try:
        cert.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return set(names) <= set(has) and cert.not_valid_after_utc - datetime.now(UTC) > RENEW


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    text = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    write_private(path, text.decode())
