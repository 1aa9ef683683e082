"""A worker gives several outputs of a text in one step, and sentence-transformers' vectors of tokens."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from heads import flag_checkpoint, source_of
from later import Later
from pooling_runner import ask, numbers, runner_of
from tokenizers import Tokenizer

from models.config import ConfigError
from worker.protocol import Pooling

TEXTS = ["The quick brown fox.", "jumps, over", "the lazy dog. That, is all; nothing more"]
st = Later("sentence_transformers")
modules = Later("sentence_transformers.base.modules")
multi = Later("sentence_transformers.multi_vector_encoder.modules")


def test_all_outputs_are_those_of_each_alone(tmp_path: Path) -> None:
    flag_checkpoint(tmp_path)
    runner = runner_of(tmp_path)
    assert runner.facts.tasks == ("embed", "token_embed", "sparse_embed")
    texts = [[5, 6, 7, 6], [9, 8], [30, 31, 32, 33, 34]]
    whole = Pooling(task="embed", outputs=("sparse_embed", "token_embed"))
    mixed = [whole, Pooling(task="embed"), whole]
    first, second, third = ask(runner, texts, mixed)
    alone = {
        task: ask(runner, texts, [Pooling(task=task)] * 3)
        for task in ("embed", "sparse_embed", "token_embed")
    }
    assert msgspec.structs.replace(first, others={}) == alone["embed"][0]
    assert first.others == {task: alone[task][0] for task in ("sparse_embed", "token_embed")}
    assert second == alone["embed"][1]
    assert third.others["token_embed"] == alone["token_embed"][2]
    assert first.others["token_embed"].shape == (3, 24)  # no vector for the first token
    ids = np.frombuffer(first.others["sparse_embed"].ids, "<i4").tolist()
    assert ids == sorted(set(ids)) and set(ids) <= {5, 6, 7}
    runner.close()


def test_late_interaction_goes_with_other_outputs(tmp_path: Path) -> None:
    flag_checkpoint(tmp_path)
    runner = runner_of(tmp_path)
    texts = [[5, 6, 7, 6], [9, 8, 7]]
    late = Pooling(task="token_embed", outputs=("embed",))
    query, document = ask(
        runner,
        texts,
        [msgspec.structs.replace(late, late_query="q"), msgspec.structs.replace(late, late_document="q")],
    )
    tokens = [numbers(each) for each in ask(runner, texts, [Pooling(task="token_embed")] * 2)]
    scores = [(tokens[0] @ other.T).amax(1).sum() for other in tokens]
    torch.testing.assert_close(numbers(query), torch.tensor([scores[0], 3.0]))
    torch.testing.assert_close(numbers(document), scores[1].unsqueeze(0))
    assert document.others == {"embed": ask(runner, texts, [Pooling(task="embed")] * 2)[1]}
    runner.close()


def fill(folder: Path, text: str, prompt: str, length: int, mask: int) -> tuple[list[int], int]:
    """The tokens of a query that is filled up, and how many fill it."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt + text).ids
    return [*ids, *[mask] * (length - len(ids))], length - len(ids)


@pytest.mark.parametrize("attend", [False, True])
@pytest.mark.parametrize("architecture", ["BertModel", "ModernBertModel", "MPNetModel"])
def test_multi_vector_encoders(architecture: str, attend: bool, tmp_path: Path) -> None:
    source = source_of(architecture, tmp_path / "source", mask_token="<|im_start|>")
    expansion = {"strategy": "fixed", "attend": attend, "length": 32}
    transformer = modules.Transformer(str(source), query_expansion=expansion)
    torch.manual_seed(0)
    parts = [
        transformer,
        modules.Dense(
            32, 24, bias=False, activation_function=torch.nn.Identity(), module_input_name="token_embeddings"
        ),
        multi.MultiVectorMask(skiplist_words=[".", ","]),
        modules.Normalize(module_input_name="token_embeddings"),
        multi.HierarchicalTokenPooling(1.5),
    ]
    made = st.MultiVectorEncoder(modules=parts, prompts={"query": "find ", "document": "say "}, device="cpu")
    made.save_pretrained(str(tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    mask = tokenizer.encode("<|im_start|>", add_special_tokens=False).ids[0]
    filled = [fill(tmp_path, text, "find ", 32, mask) for text in TEXTS[:2]]
    texts = [ids for ids, _ in filled] + [tokenizer.encode("say " + text).ids for text in TEXTS]
    runner = runner_of(tmp_path)
    params = [
        Pooling(task="token_embed", query=True, unseen=0 if attend else unseen) for _, unseen in filled
    ] + [Pooling(task="token_embed")] * 3
    answers = [numbers(each) for each in ask(runner, texts, params)]
    queries, documents = made.encode_query(TEXTS[:2]), made.encode_document(TEXTS)
    for answer, expected in zip(answers, [*queries, *documents], strict=True):
        assert answer.shape == expected.shape
        # The order of merged vectors says nothing.
        order = [rows[rows[:, 0].argsort()] for rows in (answer, expected)]
        torch.testing.assert_close(*order, atol=1e-4, rtol=1e-4)
    for text, each, answer in zip(texts, params, answers, strict=True):
        assert torch.equal(numbers(ask(runner, [text], [each])[0]), answer)
    runner.close()


def test_a_decoder_without_expansion(tmp_path: Path) -> None:
    source = source_of("Qwen3Model", tmp_path / "source", of="Qwen3ForCausalLM")
    torch.manual_seed(0)
    parts = [
        modules.Transformer(str(source)),
        modules.Dense(32, 24, bias=False, module_input_name="token_embeddings"),
        multi.MultiVectorMask(skiplist_words=[".", ","], skiplist_tasks=["query", "document"]),
        modules.Normalize(module_input_name="token_embeddings"),
    ]
    made = st.MultiVectorEncoder(modules=parts, device="cpu")
    made.save_pretrained(str(tmp_path))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    runner = runner_of(tmp_path)
    asked = [Pooling(task="token_embed", query=True)] * 3
    answers = ask(runner, [tokenizer.encode(text).ids for text in TEXTS], asked)
    for answer, expected in zip(answers, made.encode_query(TEXTS), strict=True):
        torch.testing.assert_close(numbers(answer), expected, atol=1e-4, rtol=1e-4)
    runner.close()


def test_a_decoder_cannot_hide_tokens(tmp_path: Path) -> None:
    source_of("Qwen3Model", tmp_path, of="Qwen3ForCausalLM")
    (tmp_path / "sentence_bert_config.json").write_text(
        '{"query_expansion": {"strategy": "fixed", "length": 8, "attend": false}}'
    )
    with pytest.raises((ConfigError, ValueError), match="encoders only can do"):
        runner_of(tmp_path)
