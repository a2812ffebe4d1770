"""Routes beside those that draw: pictures behind URLs, and what is not served."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from motet.services.gateway.edge.http import PathName
from motet.services.gateway.edge.openapi import Description
from motet.services.gateway.edge.parts import Gateway
from motet.services.gateway.openai.images import FILES_PATH
from motet.shared.errors import ErrorAnswer, NotFound


def add_routes(api: APIRouter, gateway: Gateway, description: Description) -> None:
    """Add the routes. All need a key, if keys are used."""

    @api.get(FILES_PATH + "{id}", **description.of("A picture that an answer named by its URL.", Response, 400, 404))
    async def picture(id: PathName, request: Request) -> Response:
        found = await gateway.preparer.drawing_now().files.read(request.state.tenant, id)
        headers = {"cache-control": "private, max-age=3600, immutable", "content-disposition": "inline"}
        return Response(found.data, headers=headers | {"x-content-type-options": "nosniff"}, media_type=found.media_type)

    @api.post("/v1/images/variations", **description.of("Not served: a 404 that says what to use.", ErrorAnswer, 404))
    async def variations(request: Request) -> Response:
        raise NotFound(
            "/v1/images/variations is not served: use /v1/images/edits with the picture as `image`, and a `strength`"
        )
