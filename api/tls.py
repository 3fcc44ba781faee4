"""What a client makes of `https`, and of `http` where a token would be read by others."""

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import httpx
from pydantic import AfterValidator

from api.errors import IsthmusError

__all__ = ["CoordinatorUrl", "certificate_fault", "is_loopback", "is_no_tls", "trusted", "warning_about"]


def _checked(text: str) -> str:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise ValueError(f"{text!r} is no URL ({error}): {_FORM}") from None
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ValueError(f"{text!r} is no coordinator's URL: {_FORM}")
    return text


_FORM = "give http://HOST:PORT or https://HOST:PORT, with the path of a prefix if it has one"

_NO_TLS = frozenset({"WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"})
"""What older and newer OpenSSLs say."""

CoordinatorUrl = Annotated[str, AfterValidator(_checked)]


def is_loopback(url: str) -> bool:
    return httpx.URL(url).host in ("localhost", "127.0.0.1", "::1")


def trusted(ca_file: Path | None) -> ssl.SSLContext | bool:
    """For httpx: the authorities of this file and no others, or those that it trusts by itself.

    Raises:
        IsthmusError: the file cannot be read, or has no certificate.
    """
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError:
        raise IsthmusError(f"{ca_file} holds no certificate: ISTHMUS_CA_FILE is to name a PEM file") from None
    except OSError as error:
        raise IsthmusError(f"cannot read the authority's certificate in {ca_file}: {error.strerror}") from None


def warning_about(url: str) -> str | None:
    """What to tell whoever sends a token there."""
    if httpx.URL(url).scheme != "http" or is_loopback(url):
        return None
    return f"{url} is not https: tokens and parameters cross the network in the clear"


def certificate_fault(error: BaseException) -> str | None:
    """Why the other side's certificate was not accepted, if that is what a connection failed for."""
    faults = (each for each in _causes(error) if isinstance(each, ssl.SSLCertVerificationError))
    return next((fault.verify_message for fault in faults), None)


def is_no_tls(error: BaseException) -> bool:
    """Whether a connection failed because the other side has answered with something else than TLS."""
    return any(isinstance(each, ssl.SSLError) and each.reason in _NO_TLS for each in _causes(error))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
