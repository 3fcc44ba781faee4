"""HTTP/1.1 messages as a proxy sees them: a head that is passed on as it is, and a body of the length it names."""

import asyncio
import re
from dataclasses import dataclass
from typing import Self

__all__ = ["Message", "flipped"]

_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)


@dataclass(frozen=True)
class Message:
    head: bytes
    body: bytes = b""

    @property
    def data(self) -> bytes:
        return self.head + self.body

    @property
    def target(self) -> bytes:
        """Of a request."""
        return self.head.split(b" ", 2)[1]

    def with_body(self, body: bytes) -> Self:
        """Whose head still says what it said."""
        return type(self)(self.head, body)

    @classmethod
    async def read(cls, reader: asyncio.StreamReader, *, bodyless: bool = False) -> Self | None:
        """The next message; None if there is no more. `bodyless`: the answer to HEAD.

        Raises:
            asyncio.IncompleteReadError: the other side went away in the middle.
        """
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError as error:
            if error.partial:
                raise
            return None
        length = _LENGTH.search(head)
        if bodyless or length is None:
            return cls(head)
        return cls(head, await reader.readexactly(int(length[1])))


def flipped(data: bytes, place: float) -> bytes:
    """With one bit changed, at this place from 0 to 1."""
    bit = int(place * len(data) * 8) % (len(data) * 8)
    return b"".join((data[: bit // 8], bytes([data[bit // 8] ^ 1 << bit % 8]), data[bit // 8 + 1 :]))
