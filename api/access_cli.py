"""`isthmus token` and `isthmus audit`: who may talk to the coordinator, and what was done there."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from api.access import AuditEvent, AuditPage, Token, TokenPage, TokenRequest
from api.connection import Connection
from api.report import print_table

__all__ = ["audit", "token_app"]

token_app = typer.Typer(no_args_is_help=True, help="Tokens that people and agents present.")
out = Console()

_PAGE = 1000

AsJson = Annotated[bool, typer.Option("--json", help="print JSON instead of text")]


@token_app.command("create")
def create_token(
    name: Annotated[str, typer.Argument(help="whose it is, or what for")],
    scope: Annotated[str, typer.Option(help="admin: may do all; observer: may read; join: may register sites")],
    expires_in_s: Annotated[int | None, typer.Option(help="seconds; default: it does not expire")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a token. It is printed this once and kept nowhere: hand it on, or lose it."""
    request = TokenRequest.model_validate({"scope": scope, "name": name, "expires_in_s": expires_in_s})
    with Connection().client() as client:
        issued = client.create_token(request)
    sys.stdout.write((issued.model_dump_json(indent=2) if as_json else issued.token) + "\n")


@token_app.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """All tokens that people hold, without their secrets."""
    with Connection().client() as client:
        tokens = client.tokens()
    if as_json:
        sys.stdout.write(TokenPage(items=tokens).model_dump_json(indent=2, include={"items"}) + "\n")
        return
    table = Table("token", "scope", "made", "expires")
    for token in tokens:
        table.add_row(token.id, token.scope, f"{token.created_at:%Y-%m-%d %H:%M:%S} UTC", _expiry(token))
    print_table(table, out)


def _expiry(token: Token) -> str:
    if token.from_settings:
        return "with the settings"
    return "never" if token.expires_at is None else f"{token.expires_at:%Y-%m-%d %H:%M:%S} UTC"


@token_app.command("revoke")
def revoke_token(token: Annotated[str, typer.Argument(help="as `isthmus token list` shows it")]) -> None:
    """Make a token worthless, from now on."""
    with Connection().client() as client:
        client.revoke_token(token)


def audit(limit: Annotated[int, typer.Option(help="how many events", min=1)] = 100, as_json: AsJson = False) -> None:
    """What administrators and agents did or tried to do, newest first."""
    events: list[AuditEvent] = []
    with Connection().client() as client:
        cursor = None
        while len(events) < limit:
            page = client.audit(cursor, min(limit - len(events), _PAGE))
            events, cursor = events + page.items, page.next_cursor
            if cursor is None:
                break
    if as_json:
        sys.stdout.write(AuditPage(items=events).model_dump_json(indent=2, include={"items"}) + "\n")
        return
    table = Table("time", "who", "scope", "act", "target", "answer")
    for event in events:
        who = f"{event.name} ({event.token})" if event.token not in ("", event.name) else event.name
        at = f"{event.at:%Y-%m-%d %H:%M:%S} UTC"
        table.add_row(at, who, event.scope, event.act, escape(event.target), str(event.status))
    print_table(table, out)
