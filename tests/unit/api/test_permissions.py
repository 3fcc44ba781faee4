"""Routes say whose tokens are good for them, or the application does not even start."""

import pytest
from fastapi import APIRouter

from api.permissions import GuardedRoute


def test_a_route_that_does_not_say_whose_it_is():
    router = APIRouter(route_class=GuardedRoute)
    with pytest.raises(TypeError, match="/everybodys: say with @allowed"):

        @router.get("/everybodys")
        async def everybodys():
            return None
