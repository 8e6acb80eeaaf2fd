"""The daemon's certificate, generated at each start and known only to its agents.

Owns the TLS settings of both ends.  No authority is asked and no clock: an agent takes this one certificate, for ever.
"""

import datetime
import os
import ssl
from typing import NamedTuple

BEGIN, END = datetime.datetime(2000, 1, 1), datetime.datetime(9999, 12, 31)


class Certificate(NamedTuple):
    """A certificate as PEM, and the daemon's end of TLS with it."""

    pem: str
    context: ssl.SSLContext


def make_certificate() -> Certificate:
    """Make a key, which never leaves this process's memory, and its certificate.  Needs `melld[cluster]`."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "melld")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(BEGIN)
        .not_valid_after(END)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    plain = serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    with os.fdopen(os.memfd_create("melld-key"), "wb", 0) as file:  # `ssl` reads files alone
        file.write(secret + pem)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return Certificate(pem.decode(), context)


def pinned_context(pem: str) -> ssl.SSLContext:
    """Return an agent's end of TLS, which takes no other certificate."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate is the daemon's, whatever its address
    context.load_verify_locations(cadata=pem)
    return context


def _context(protocol: int) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
