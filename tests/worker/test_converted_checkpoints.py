"""Static vectors beside sentence-transformers, and a checkpoint of Stanford's ColBERT beside its formula."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
import torch.nn.functional as F
from heads import source_of
from later import Later
from pooling_runner import ask, numbers, runner_of
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from zoo import wordpiece

from models.config import read_config
from models.plain_files import FileError
from models.pooling.config import read_pooling
from models.pooling.converted_checkpoints import find_or_make
from worker.protocol import Pooling

TEXTS = ["The quick brown fox.", "jumps, over", "the lazy dog. That, is all; nothing more"]
st = Later("sentence_transformers")
modules = Later("sentence_transformers.sentence_transformer.modules")
transformers = Later("transformers")


def made_of(folder: Path) -> Path:
    cache = folder.parent / "cache"
    cache.mkdir(exist_ok=True)
    return find_or_make(folder, lambda name, found: cache)


def compare(folder: Path, expected: Tensor) -> None:
    made = made_of(folder)
    assert made != folder and made_of(folder) == made and made_of(made).is_dir()
    pooling = read_pooling(made, read_config(made), {})
    assert pooling.texts.has_special and pooling.modes == ("MEAN",)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    texts = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    runner = runner_of(made)
    answers = ask(runner, texts, [Pooling(task="embed")] * len(texts))
    torch.testing.assert_close(torch.stack([numbers(one) for one in answers]), expected, atol=1e-5, rtol=1e-5)
    assert numbers(ask(runner, texts[:1], [Pooling(task="token_embed")])[0]).shape == (len(texts[0]), 16)
    runner.close()


@pytest.mark.parametrize("normalized", [True, False])
def test_static_vectors_of_sentence_transformers(tmp_path: Path, normalized: bool) -> None:
    tokenizer = wordpiece()
    torch.manual_seed(2)
    static = modules.StaticEmbedding(tokenizer, torch.randn(tokenizer.get_vocab_size(), 16).numpy())
    made = st.SentenceTransformer(
        modules=[static, *([modules.Normalize()] if normalized else [])], device="cpu"
    )
    made.save_pretrained(str(tmp_path / "saved"))
    (tmp_path / "saved" / "config.json").unlink(missing_ok=True)
    compare(tmp_path / "saved", made.encode(TEXTS, convert_to_tensor=True))


def test_static_vectors_of_model2vec_that_tokens_share(tmp_path: Path) -> None:
    folder, tokenizer = tmp_path / "model2vec", wordpiece()
    folder.mkdir()
    count = tokenizer.get_vocab_size()
    torch.manual_seed(3)
    table, mapping, weights = torch.randn(40, 16), torch.randint(40, (count,)), torch.rand(count)
    tensors = {"embeddings": table, "mapping": mapping, "weights": weights}
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"model_type": "model2vec", "architectures": ["StaticModel"], "normalize": True}
    (folder / "config.json").write_text(json.dumps(config))
    bags = [tokenizer.encode(text, add_special_tokens=False).ids for text in TEXTS]
    found = torch.stack([(table[mapping[ids]] * weights[ids][:, None]).mean(0) for ids in bags])
    compare(folder, F.normalize(found, dim=-1))


def test_static_vectors_without_a_table(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "model2vec"}')
    with pytest.raises(FileError, match="is missing"):
        made_of(tmp_path)
    save_file({"other": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(FileError, match=r"has neither 'embedding.weight' nor 'embeddings'"):
        made_of(tmp_path)


def test_stanfords_colbert(tmp_path: Path) -> None:
    folder = tmp_path / "colbert"
    source_of("BertModel", folder)
    bert = transformers.AutoModel.from_pretrained(folder).eval()
    torch.manual_seed(4)
    linear = torch.randn(24, bert.config.hidden_size)
    tensors = {f"bert.{name}": each for name, each in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"linear.weight": linear}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["HF_ColBERT"]}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    words = [one for one in tokenizer.get_vocab() if one.isalpha()][:2]
    metadata = {"query_token_id": words[0], "doc_token_id": words[1], "query_maxlen": 12, "doc_maxlen": 30}
    (folder / "artifact.metadata").write_text(json.dumps({**metadata, "dim": 24, "nbits": 1}))
    special = {"mask_token": words[1], "cls_token": words[0]}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    made = made_of(folder)
    pooling = read_pooling(made, read_config(made), {})
    texts, expansion = pooling.texts, pooling.texts.expansion
    assert expansion is not None and (expansion.length, expansion.fixed, expansion.attends) == (
        12,
        True,
        False,
    )
    assert texts.prompts == {"query": words[0], "document": words[1]} and texts.document_length == 30
    ids = tokenizer.encode("the lazy dog").ids[:8]
    filled = [*ids, *[expansion.token] * (12 - len(ids))]
    seen = torch.tensor([[1] * len(ids) + [0] * (12 - len(ids))])
    with torch.inference_mode():
        states = bert(torch.tensor([filled]), attention_mask=seen).last_hidden_state[0]
    runner = runner_of(made)
    asked = Pooling(task="token_embed", query=True, unseen=12 - len(ids))
    [answer] = ask(runner, [filled], [asked])
    expected = F.normalize(states @ linear.t(), dim=-1)
    torch.testing.assert_close(numbers(answer), expected, atol=1e-4, rtol=1e-4)
    skipped = pooling.token_vectors.skipped
    assert skipped, "punctuation has no vectors in documents"
    document = [*ids, skipped[0]]
    [answer] = ask(runner, [document], [msgspec.structs.replace(asked, query=False, unseen=0)])
    assert len(numbers(answer)) == sum(id not in skipped for id in document)
    runner.close()
