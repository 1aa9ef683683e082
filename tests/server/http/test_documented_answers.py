"""What /openapi.json says of routes, of their bodies and of their answers."""

from typing import Any

import pytest

from server.errors import BadRequest, error_body
from server.http.endpoint import Endpoint
from server.routes import batches, models
from server.routes.adapters import loading
from server.run.app import OLLAMA_ROUTERS, ROUTERS, openapi_schema

pytestmark = pytest.mark.slow(2)


@pytest.fixture(scope="module")
def paths() -> dict[str, Any]:
    return openapi_schema()["paths"]


def test_every_documented_route_is_an_endpoint(paths: dict[str, Any]) -> None:
    documented = {(method, path) for path, methods in paths.items() for method in methods}
    routers = [*ROUTERS, *OLLAMA_ROUTERS, batches.router, models.loading, loading.router]
    routes = [route for router in routers for route in router.routes if isinstance(route, Endpoint)]
    assert {
        (method.lower(), route.path_format)
        for route in routes
        if route.include_in_schema
        for method in route.methods or ()
    } == documented


def test_errors_are_documented_as_they_are(paths: dict[str, Any]) -> None:
    for path, methods in paths.items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert {"4XX", "5XX"} <= set(answers) and "422" not in answers, f"{method} {path}"
            error = answers["4XX"]["content"]["application/json"]["schema"]["properties"]
            assert set(error) == set(error_body(BadRequest("no"), path)), path


def test_routes_that_may_stream_say_so(paths: dict[str, Any]) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }
    assert set(paths["/v1/embeddings"]["post"]["responses"]["200"]["content"]) == {"application/json"}
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_bodies_have_the_names_that_clients_send() -> None:
    bodies = openapi_schema()["components"]["schemas"]
    batch = bodies["BatchChatRequest"]
    assert "conversations" not in batch["properties"] and "messages" in batch["required"]
    assert batch["properties"]["messages"]["items"]["items"] == {"$ref": "#/components/schemas/Message"}
    embedding = bodies["LlamaEmbedRequest"]
    assert {"content", "input", "inputs"} <= {*embedding["properties"]} and not embedding["required"]
