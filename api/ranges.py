"""The `Range` field of a request for a blob (RFC 9110): one range of bytes, or all of them."""

import re

from api.errors import RangeError

__all__ = ["byte_range"]

_RANGE = re.compile(r"bytes=\s*(\d*)\s*-\s*(\d*)\s*", re.ASCII | re.IGNORECASE)


def byte_range(field: str | None, size: int) -> tuple[int, int] | None:
    """Start and stop (exclusive) of what is asked for; None: everything, also if the field cannot be made out.

    Raises:
        RangeError: nothing of it is there.
    """
    found = _RANGE.fullmatch(field or "")
    if found is None or found[1] == found[2] == "":
        return None
    first, last = (int(text) if text else None for text in found.groups())
    if first is None:
        start, stop = max(size - (last or 0), 0), size
    else:
        start, stop = first, size if last is None else min(last + 1, size)
        if last is not None and last < first:
            return None
    if start >= stop:
        raise RangeError(
            "range_not_satisfiable", f"{field} of a blob of {size} bytes is nothing", context={"size": size}
        )
    return start, stop
