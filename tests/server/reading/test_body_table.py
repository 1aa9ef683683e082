"""Every endpoint with texts is in the table, and a body without its texts can be read."""

import pytest
from pydantic import TypeAdapter

from server.http.endpoint import Endpoint
from server.reading.body_table import BY_NAME, MANY_TEXTS, OTHER_BODY, USUAL_BODY
from server.reading.endpoint_table import BY_PATH, TABLE
from server.run.app import OLLAMA_ROUTERS, ROUTERS
from server.schemas.body import Body

OTHERS = {
    *("/abort", "/ping", "/v1/responses/{response_id}/cancel", "/sleep", "/wake_up", "/reset_prefix_cache"),
    *("/v1/responses/compact", "/reset_mm_cache", "/flush_cache", "/invocations", "/api/show", "/api/pull"),
    *("/api/push", "/api/create", "/api/copy", "/"),
    *("/v1/files", "/v1/batches", "/v1/batches/{batch_id}/cancel"),
    *("/v1/messages/batches", "/v1/messages/batches/{message_batch_id}/cancel"),
    *(f"/v1/conversations{rest}" for rest in ("", "/{conversation_id}", "/{conversation_id}/items")),
}


def test_every_endpoint_with_texts_is_in_it() -> None:
    routers = [*ROUTERS, *OLLAMA_ROUTERS]
    routes = [route for router in routers for route in router.routes if isinstance(route, Endpoint)]
    takes_body = {route.path for route in routes if "POST" in (route.methods or ())}
    assert takes_body == BY_PATH.keys() | OTHERS


def test_the_helper_knows_every_reading_by_its_name() -> None:
    read = {reading for row in TABLE for reading in (row.reading, *row.dialects.values()) if reading}
    assert {BY_NAME[reading.name] for reading in read} == read and len(BY_NAME) == len(read)


@pytest.mark.parametrize("path", [path for path, row in BY_PATH.items() if row.reading])
def test_longest_bodies(path: str) -> None:
    one = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")
    one += (
        "/api/chat",
        "/api/generate",
        "/completion",
        "/chat/completions",
        "/generate",
        "/apply-template",
        "/infill",
        "/v1/decisions",
        "/v1/systemone",
        "/v2/chat",
        "/cohere/v2/chat",
    )
    texts = not path.startswith(one) and path not in ("/tokenize", "/detokenize", "/decode")
    assert most_bytes_of(path) == (MANY_TEXTS if texts else USUAL_BODY)
    assert OTHER_BODY < USUAL_BODY < MANY_TEXTS


def most_bytes_of(path: str) -> int:
    reading = BY_PATH[path].reading
    assert reading is not None
    return reading.most_bytes


SHORT = {
    "completion": {"prompt": "a", "n": 2, "stop": ["x"], "stream_options": None},
    "chat": {
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"function": {"name": "f"}}],
        "continue_final_message": True,
    },
    "responses": {
        "input": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "name": "f"}],
        "tool_choice": {"type": "function", "name": "f"},
        "include": ["reasoning.encrypted_content"],
    },
    "input_tokens": {"input": "a"},
    "messages": {
        "model": "tiny",
        "max_tokens": 3,
        "messages": [{"role": "user", "content": "a"}],
        "system": [{"type": "text", "text": "be"}],
        "tools": [{"name": "f", "input_schema": {}}],
        "tool_choice": {"type": "tool", "name": "f"},
    },
    "cohere_chat": {"messages": [{"role": "user", "content": "a"}], "documents": ["b"], "strict_tools": True},
    "count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 3},
    "tokenize": {"messages": [{"role": "user", "content": "a"}]},
    "detokenize": {"tokens": [1]},
    "llama_completion": {"prompt": "a", "n_predict": -1, "n_probs": 2},
    "llama_infill": {"input_prefix": "a", "input_suffix": "b", "prompt": "c"},
    "batch_chat": {"messages": [[{"role": "user", "content": "a"}]], "max_tokens": 3},
    "sglang_generate": {"text": ["a"], "sampling_params": {"max_new_tokens": 3}, "return_logprob": True},
    "llama_tokenize": {"content": "a", "with_pieces": True},
    "tei_tokenize": {"inputs": "a", "add_special_tokens": False},
    "decode": {"ids": [1], "skip_special_tokens": False},
    "llama_embed": {"content": "a"},
    "embeddings": {"input": "a", "prompt_name": "query", "normalize": False},
    "pooling": {"input": [{"role": "user", "content": "a"}]},
    "classify": {"input": [[1, 2]]},
    "cohere": {"inputs": [{"content": "a"}], "embedding_types": ["float"]},
    "embed": {"inputs": ["a"], "normalize": False},
    "embed_all": {"inputs": ["a"]},
    "predict": {"inputs": [["a", "b"]], "raw_scores": True},
    "similarity": {"inputs": {"source_sentence": "a", "sentences": ["b"]}},
    "score": {"queries": "a", "items": ["b"], "instruction": "c"},
    "rerank": {"query": "a", "documents": ["b"], "top_n": 1},
    "tei_rerank": {"query": "a", "texts": ["b"], "raw_scores": True},
    "voyage_rerank": {"query": "a", "documents": ["b"], "top_k": 1},
    "infinity_rerank": {"query": "a", "documents": ["b"], "raw_scores": True},
    "ollama_chat": {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "options": {"stop": ["x"]},
    },
    "ollama_generate": {"model": "tiny", "prompt": "a", "system": "be", "think": True},
    "ollama_embed": {"model": "tiny", "input": ["a"], "truncate": False},
    "ollama_embeddings": {"model": "tiny", "prompt": "a", "keep_alive": 0},
    "ollama_rerank": {"model": "tiny", "query": "a", "documents": ["b"], "top_n": 1},
}


@pytest.mark.parametrize("name", SHORT)
def test_a_body_without_its_texts_is_a_body(name: str) -> None:
    adapter = TypeAdapter(BY_NAME[name].body)
    whole: Body = adapter.validate_python(SHORT[name])
    left: Body = adapter.validate_python(whole.without_texts())
    kept = set(type(whole).__pydantic_fields__) - set(whole.stand_ins)
    assert {field: getattr(left, field) for field in kept} == {field: getattr(whole, field) for field in kept}
