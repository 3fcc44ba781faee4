"""What the messages of the REST API are made of. Wire words equal the code's words."""

import re
from typing import Annotated

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
)

PROTOCOL_VERSION = 1
SUPPORTED_PROTOCOLS = range(1, 2)

_NAME = re.compile(r"[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?")


def _checked_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(f"{value[:80]!r} is no name: use lower-case letters, digits, - and _ inside, at most 63")
    return value


Name = Annotated[str, AfterValidator(_checked_name), Field(json_schema_extra={"pattern": f"^{_NAME.pattern}$"})]
"""Of a site, region, run or task: lower case letters, digits, `-` and `_`, at most 63."""
RunId = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]{0,79}$")]
"""The run's name and a random end; also a folder's name at sites."""
Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256, in lower-case hexadecimal."""
TaskVersion = Annotated[str, StringConstraints(max_length=100)]
"""What a site says of the code of a task; nothing if it does not know."""
Secret = Annotated[str, StringConstraints(min_length=32, max_length=256)]
Step = Annotated[int, Field(ge=0, le=2**48)]
Count = Annotated[int, Field(ge=0, le=2**62)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
