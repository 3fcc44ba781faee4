"""What a site uploads of its copies in fewer bits, and what that leaves for the next outer round (rule A14).

At rank 0 only. Source: docs/decisions/0005-outer.md, section 4.
"""

import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from algorithms.coefficients import fragment_layout
from algorithms.compression import encode, left_over, wanted
from algorithms.fragment_picks import pick_largest
from algorithms.layout import ParameterLayout
from api.encodings import coefficients_message, read_encoding
from api.specs import OuterSpec
from api.transfers import Source
from site_agent.replica import Anchor

__all__ = ["Encodings"]

Values = NDArray[np.float32]


class _Encoded(NamedTuple):
    """A copy, by its digest, in an outer round."""

    number: int
    copy: str
    wanted: Values
    body: bytes


class Encodings:
    """Encodes copies of fragments, and keeps what was not said of them.

    Args:
        region: of this site.
        fetch: gets a blob by its digest.
    """

    def __init__(self, outer: OuterSpec, layout: ParameterLayout, region: str, fetch: Callable[[str], bytes]) -> None:
        self._outer = outer
        self._region = region
        self._fetch = fetch
        self._layouts = [fragment_layout(layout, tensors) for tensors in layout.fragments(outer.fragments)]
        self._left: dict[int, tuple[int, Values]] = {}
        """By fragment, and the outer round in which it was left: it counts only on top of that one's anchor."""
        self._encoded: dict[int, _Encoded] = {}

    def encode(self, number: int, fragment: int, anchor: Anchor, copy: Source, digest: str) -> bytes:
        """What is uploaded of the copy of that digest in outer round `number`; made once. `anchor`: the one before."""
        return self._made(number, fragment, anchor, copy, digest).body

    def _made(self, number: int, fragment: int, anchor: Anchor, copy: Source, digest: str) -> _Encoded:
        known = self._encoded.get(fragment)
        if known is None or (known.number, known.copy) != (number, digest):
            before, left = self._left.get(fragment, (0, None))
            if left is None or before != anchor.outer_round:
                left = np.zeros_like(anchor.values)
            want = wanted(anchor.values, np.frombuffer(b"".join(copy.blocks(0)), "<f4"), left)
            known = self._encoded[fragment] = _Encoded(number, digest, want, self._body(fragment, want))
        return known

    def _body(self, fragment: int, want: Values) -> bytes:
        codec, layout, k = self._outer.codec, self._layouts[fragment], self._outer.k
        assert codec != "fp32"
        if codec != "topk":
            return encode(codec, want).tobytes()
        picked = pick_largest(want, layout, k) if np.isfinite(want).all() else None
        return coefficients_message(picked, layout, k)

    def settle(self, header: dict[str, Any], anchor: Anchor, copy: Source, digest: str) -> None:
        """Keeps what is left of the copy of that digest, by the entry of the anchor that was made of it.

        Nothing is left of a copy that is not among those of the region: this site comes back to the others.
        """
        fragment = header["fragment"]
        upload = _uploads(header, self._region).get(digest)
        if upload is None:
            self._encoded.pop(fragment, None)
            self._left.pop(fragment, None)
            return
        made = self._made(header["outer_round"], fragment, anchor, copy, digest)
        del self._encoded[fragment]
        body = made.body if hashlib.sha256(made.body).hexdigest() == upload else self._fetch(upload)
        said = read_encoding(body, self._outer.codec, self._outer.k, self._layouts[fragment])
        self._left[fragment] = header["outer_round"], left_over(made.wanted, said)


def _uploads(header: dict[str, Any], region: str) -> dict[str, str]:
    """The uploads of a region's copies, by the digests of these."""
    line: dict[str, Any] = next((line for line in header["participants"] if line["region"] == region), {})
    copies = line.get("copies") or [line.get("digest")]
    return dict(zip(copies, line.get("uploads", []), strict=False))
