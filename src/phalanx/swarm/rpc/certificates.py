"""Certificate authority of a swarm. Members trust its certificate, and each has a certificate with its own name.

CERTS/ca.pem  ca.key                 the authority; the key stays with its owner
CERTS/NAME/ca.pem  cert.pem  key.pem  the files of a member
"""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from phalanx.spec.errors import UserError

VALID_DAYS = 365
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
"""Pattern of a member's name, which is also the name of its files."""


def create_certificate_authority(folder: Path) -> None:
    """Create a certificate authority; raise UserError if the folder already has one."""
    if (folder / "ca.key").exists():
        problem = "already has an authority"
        raise UserError("certs", str(folder), problem, "issue certificates with it, or use another folder")
    folder.mkdir(parents=True, exist_ok=True)
    # A unique name distinguishes a certificate of another authority from a forged one.
    key = ec.generate_private_key(ec.SECP256R1())
    name = _x509_name(f"phalanx swarm authority {secrets.token_hex(4)}")
    certificate = (
        _build_certificate(name, name, key.public_key(), days=10 * VALID_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    _write_key(folder / "ca.key", key)
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))


def issue_certificate(folder: Path, member: str, hosts: list[str], days: float = VALID_DAYS) -> Path:
    """Issue a certificate for a member, and return its folder.

    `hosts` are the names and addresses by which nodes reach a coordinator. Raises UserError if the name is invalid or
    taken, or the folder has no authority.
    """
    if not NAME_PATTERN.fullmatch(member):
        problem = "is not a valid member name"
        raise UserError("name", member, problem, "use letters, digits, dots, dashes and underscores")
    try:
        authority_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), None)
        authority = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    except (OSError, ValueError) as error:
        fix = "create one: phalanx swarm certs FOLDER"
        raise UserError("certs", str(folder), f"has no authority: {error}", fix) from None
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    member_key = ec.generate_private_key(ec.SECP256R1())
    member_folder = folder / member
    if member_folder.exists():
        problem = f"already has a certificate in {member_folder}"
        raise UserError("name", member, problem, "use another name, or remove the certificate")
    names: list[x509.GeneralName] = [_x509_host(host) for host in hosts] or [x509.DNSName(member)]
    certificate = (
        _build_certificate(_x509_name(member), authority.subject, member_key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), critical=False
        )
        .sign(authority_key, hashes.SHA256())
    )
    member_folder.mkdir(mode=0o700)
    _write_key(member_folder / "key.pem", member_key)
    (member_folder / "cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (member_folder / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    return member_folder


def certificate_member(folder: Path) -> str:
    """Return the name in the certificate of a member's folder.

    Raises UserError if the folder has no certificate, or its certificate has expired.
    """
    try:
        certificate = x509.load_pem_x509_certificate((folder / "cert.pem").read_bytes())
        for file in ("key.pem", "ca.pem"):
            (folder / file).read_bytes()
    except (OSError, ValueError) as error:
        fix = "use the folder of this member, which phalanx swarm certs has created"
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise UserError("--certs", str(folder), f"has no certificate: {reason}", fix) from None
    if certificate.not_valid_after_utc < datetime.now(UTC):
        problem = f"expired on {certificate.not_valid_after_utc:%Y-%m-%d}"
        raise UserError("--certs", str(folder), problem, "ask the owner of the authority for a new one")
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def _x509_name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _build_certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key)
    builder = builder.serial_number(x509.random_serial_number())
    # Clocks of sites may be some minutes apart.
    return builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=days))


def _x509_host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    key_format = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(key.private_bytes(*key_format))
