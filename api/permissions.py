"""Who may ask what: `@allowed(...)` on a route, checked when the route is known and before the body is read."""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError, create_model
from starlette.exceptions import HTTPException

from api.authentication import principal_of
from api.errors import ForbiddenError, InvalidError, ProblemError
from api.service import Principal, Scope

__all__ = ["DirectRoute", "GuardedRoute", "allowed", "require"]

E = TypeVar("E", bound=Callable[..., Any])
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


def allowed(*scopes: Scope, act: str | None = None) -> Callable[[E], E]:
    """Marks a route as one for tokens of these scopes; `act`: what it does, if that is to be recorded."""

    def marked(endpoint: E) -> E:
        endpoint.__dict__.update(scopes=scopes, act=act)
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

    def get_route_handler(self) -> Handler:
        handle = self.handler()
        scopes = getattr(self.endpoint, "scopes", None)
        if scopes is None:
            raise TypeError(f"{self.path}: say with @allowed(...) whose tokens are good for it")

        async def guarded(request: Request) -> Response:
            place = request.path_params
            require(principal_of(request), *scopes, site=place.get("site"), run=place.get("run"))
            try:
                return await handle(request)
            except HTTPException as error:  # FastAPI's "There was an error parsing the body"
                if isinstance(error.__cause__, ProblemError):
                    raise error.__cause__ from None
                if isinstance(error.__cause__, ValueError | RecursionError):
                    fault = f"body: {error.__cause__}"
                    raise InvalidError("invalid_request", fault, errors=[fault]) from None
                raise

        return guarded

    def handler(self) -> Handler:
        return super().get_route_handler()


class DirectRoute(GuardedRoute):
    """For an endpoint that takes the request and what its URL says, and no more: that is validated at once.

    FastAPI looks at each parameter by itself, for dependencies, bodies and more. Where a request is made by every site
    at every step, that is worth avoiding.
    """

    def handler(self) -> Handler:
        _, *parameters = inspect.signature(self.endpoint).parameters.values()
        fields: dict[str, Any] = {
            one.name: (one.annotation, ... if one.default is one.empty else one.default) for one in parameters
        }
        url = create_model("URL", **fields)

        async def handle(request: Request) -> Response:
            place = request.path_params
            try:
                said = url.model_validate({**request.query_params, **place})
            except ValidationError as error:
                faults = [
                    {**fault, "loc": ("path" if fault["loc"][0] in place else "query", *fault["loc"])}
                    for fault in error.errors()
                ]
                raise RequestValidationError(faults) from None
            answer: Response = await self.endpoint(request, **said.__dict__)
            return answer

        return handle
