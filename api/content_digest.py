"""`Content-Digest: sha-256=:BASE64:` (RFC 9530): a body that was changed on its way is noticed before it counts."""

import base64
import binascii
import hashlib
import re

__all__ = ["DIGEST_MISMATCH", "FIELD", "agrees", "content_digest", "content_digest_of", "promised"]

FIELD = "Content-Digest"
DIGEST_MISMATCH = "digest_mismatch"
"""Code of the refusal: the same bytes are to be sent again."""

_SHA_256 = re.compile(r"(?:^|,)\s*sha-256=:([A-Za-z0-9+/=]*):", re.IGNORECASE)


def content_digest(body: bytes) -> str:
    """The value of the field for this body."""
    return content_digest_of(hashlib.sha256(body).digest())


def content_digest_of(sha256: bytes) -> str:
    return f"sha-256=:{base64.b64encode(sha256).decode()}:"


def agrees(field: str | None, body: bytes) -> bool:
    """Whether the body is the one that was sent, as far as the field, if there is one, can tell."""
    sha256 = promised(field)
    return sha256 is None or sha256 == hashlib.sha256(body).digest()


def promised(field: str | None) -> bytes | None:
    """The SHA-256 that the field names; None if it names none, nothing if what it names cannot be read."""
    found = _SHA_256.search(field or "")
    if found is None:
        return None
    try:
        return base64.b64decode(found[1], validate=True)
    except binascii.Error:
        return b""
