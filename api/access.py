"""Messages about access to the API: tokens, and the record of administrative acts."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from api.message import Message, Name

__all__ = ["AuditEvent", "AuditPage", "IssuedToken", "Scope", "Token", "TokenPage", "TokenRequest"]

Scope = Literal["admin", "observer", "join", "site", "ranks"]
"""What a token is good for; those of sites and ranks are made by agents, the others are held by people."""
_LONGEST_S = 10 * 366 * 86_400


class TokenRequest(Message):
    scope: Literal["admin", "observer", "join"] = Field(description="may do all; only read; only register sites")
    name: Name = Field(description="whose it is or what for; need not be unique")
    expires_in_s: int | None = Field(default=None, ge=1, le=_LONGEST_S, description="default: it does not expire")


class Token(Message):
    """A token without its secret, which is known to nobody but its holder."""

    id: str
    name: str
    scope: Scope
    created_at: datetime
    expires_at: datetime | None = None
    from_settings: bool = Field(default=False, description="made or named by the coordinator's settings")


class IssuedToken(Token):
    token: str = Field(description="the secret; it is answered this once")


class TokenPage(Message):
    items: list[Token]
    next_cursor: str | None = None


class AuditEvent(Message):
    """One administrative act, or one that was refused."""

    id: int
    at: datetime
    token: str = Field(description="id of the token")
    name: str = Field(description="of the token, or the site whose it is")
    scope: Scope
    act: str = Field(description="such as `run.start`")
    target: str = Field(description="such as `runs/first-0a1b2c3d`")
    status: int = Field(description="what was answered; 400 and more: it was not done")


class AuditPage(Message):
    items: list[AuditEvent] = Field(description="newest first")
    next_cursor: str | None = None
