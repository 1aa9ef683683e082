"""What /openapi.json says of answers."""

import pytest

from server.run.app import openapi_schema

pytestmark = pytest.mark.slow(2)


def test_errors_are_documented_as_they_are() -> None:
    for path, methods in openapi_schema()["paths"].items():
        for method, operation in methods.items():
            answers = operation["responses"]
            assert {"4XX", "5XX"} <= set(answers) and "422" not in answers, f"{method} {path}"
            error = answers["4XX"]["content"]["application/json"]["schema"]["properties"]
            assert ("detail" if path == "/v1/systemone" else "error") in error
            assert ("type" in error) == path.startswith("/v1/messages")


def test_routes_that_may_stream_say_so() -> None:
    paths = openapi_schema()["paths"]
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        assert set(paths[path]["post"]["responses"]["200"]["content"]) == {
            "application/json",
            "text/event-stream",
        }
    assert set(paths["/v1/embeddings"]["post"]["responses"]["200"]["content"]) == {"application/json"}
    assert set(paths["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}
