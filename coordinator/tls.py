"""The coordinator's own certificate, checked before anything is started."""

import ssl
from ipaddress import ip_address
from pathlib import Path

from api.errors import IsthmusError

__all__ = ["check_certificate", "is_loopback"]


class _EncryptedKeyError(Exception):
    pass


def check_certificate(certificate: Path, key: Path) -> None:
    """Raises IsthmusError unless both files can be read and belong together."""
    for option, path in (("tls-cert", certificate), ("tls-key", key)):
        try:
            path.read_bytes()
        except OSError as error:
            raise IsthmusError(f"cannot read --{option} {path}: {error.strerror}") from None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, _no_password)
    except _EncryptedKeyError:
        raise IsthmusError(f"--tls-key {key} is encrypted: give one without a password") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise IsthmusError(
                f"--tls-key {key} is not the key of the certificate in --tls-cert {certificate}"
            ) from None
        raise IsthmusError(
            f"--tls-cert {certificate} and --tls-key {key} are to be PEM files of a certificate with its chain, and of "
            f"its key ({error.reason or error})"
        ) from None


def _no_password() -> str:
    raise _EncryptedKeyError


def is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
