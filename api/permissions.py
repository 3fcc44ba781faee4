"""Who may ask what: `@allowed(...)` on a route, checked when the route is known and before the body is read."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute

from api.authentication import principal_of
from api.errors import ForbiddenError
from api.service import Principal, Scope

__all__ = ["GuardedRoute", "allowed", "require"]

E = TypeVar("E", bound=Callable[..., Any])


def allowed(*scopes: Scope) -> Callable[[E], E]:
    """Marks a route as one for tokens of these scopes."""

    def marked(endpoint: E) -> E:
        endpoint.__dict__["scopes"] = scopes
        return endpoint

    return marked


def require(principal: Principal, *scopes: str, site: str | None = None, run: str | None = None) -> None:
    """Raises ForbiddenError unless the token has one of the scopes and belongs to this site and run."""
    if principal.scope not in scopes:
        needed = " or ".join(scopes)
        raise ForbiddenError("wrong_scope", f"this needs a token with scope {needed}, not {principal.scope}")
    if principal.scope in ("site", "ranks") and site is not None and principal.site != site:
        raise ForbiddenError("wrong_site", f"this token belongs to site {principal.site!r}, not to {site!r}")
    if principal.scope == "ranks" and run is not None and principal.run != run:
        raise ForbiddenError("wrong_run", f"this token belongs to run {principal.run}, not to {run}")


class GuardedRoute(APIRoute):
    """A route for the scopes that its endpoint is marked with; `{site}` and `{run}` in its path are the token's own."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        scopes = getattr(self.endpoint, "scopes", None)
        if scopes is None:
            raise TypeError(f"{self.path}: say with @allowed(...) whose tokens are good for it")

        async def guarded(request: Request) -> Response:
            place = request.path_params
            require(principal_of(request), *scopes, site=place.get("site"), run=place.get("run"))
            return await handle(request)

        return guarded
