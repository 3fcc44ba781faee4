"""How HTTP reaches a coordinator: straight, or through the proxy that the environment names."""

from pathlib import Path
from urllib.request import getproxies, proxy_bypass

import httpx

from api.tls import is_loopback, trusted

__all__ = ["transport_to"]


def transport_to(url: str, ca_file: Path | None = None) -> httpx.HTTPTransport:
    """`ca_file`: PEM file of the authority whose certificates are trusted, and of no other.

    Raises:
        IsthmusError: that cannot be read, or has no certificate.
    """
    return httpx.HTTPTransport(
        verify=trusted(ca_file),
        trust_env=not is_loopback(url),
        limits=httpx.Limits(max_connections=8, keepalive_expiry=4.0),
        proxy=_proxy_to(httpx.URL(url)),
    )


def _proxy_to(url: httpx.URL) -> str | None:
    """By HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY; none for loopback."""
    if is_loopback(str(url)) or proxy_bypass(url.netloc.decode()):
        return None
    proxies = getproxies()
    named = proxies.get(url.scheme) or proxies.get("all")
    return named if named is None or "://" in named else f"http://{named}"
