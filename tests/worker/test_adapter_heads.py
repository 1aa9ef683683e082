"""Adapters bring heads of their own, of any number of labels, for a base that generates."""

from pathlib import Path

import torch
import transformers
from opened import open_runner
from peft_adapters import make_adapter
from tiny import tiny_checkpoint

from models.conversion.conversion_choice import Conversion
from worker.calls.messages import ENTER_ADAPTER, READ_ADAPTER, AdapterFacts, WorkerCall
from worker.options import LoraOptions
from worker.protocol import NewSeq, Pooling, Sampling, SeqStep, StepInput

PROMPT = list(range(20, 31))
LORA = LoraOptions(enable_lora=True)


def test_texts_and_tokens_are_labelled_beside_an_answer(tmp_path: Path) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base")
    classes = {
        "SEQ_CLS": (transformers.AutoModelForSequenceClassification, 3),
        "TOKEN_CLS": (transformers.AutoModelForTokenClassification, 2),
    }
    made = [
        make_adapter(
            base,
            tmp_path / task,
            model=cls.from_pretrained(base, num_labels=labels, dtype=torch.float32, pad_token_id=0),
            task_type=task,
            target_modules=["q_proj", "v_proj"],
        )
        for task, (cls, labels) in classes.items()
    ]
    runner = open_runner(base, lora=LORA, dtype="float32", tasks=("generate", "embed", "token_embed"))
    facts = [
        runner.call(WorkerCall(1, READ_ADAPTER, [at, str(each.folder)])) for at, each in enumerate(made, 1)
    ]
    assert not [each.error for each in facts if each.error]
    for number in (1, 2):
        assert not runner.call(WorkerCall(1, ENTER_ADAPTER, [number])).error
    of_texts: AdapterFacts = facts[0].result
    assert (of_texts.tasks, of_texts.widths, len(of_texts.labels)) == (("classify",), {"classify": 3}, 3)
    new = [
        NewSeq(0, PROMPT, len(PROMPT), Sampling(max_tokens=1, temperature=0)),
        NewSeq(1, PROMPT, len(PROMPT), Pooling("classify", use_activation=False), adapter=1),
        NewSeq(2, PROMPT, len(PROMPT), Pooling("token_classify", use_activation=False), adapter=2),
        NewSeq(3, PROMPT, len(PROMPT), Pooling("embed"), adapter=1),
    ]
    rows = [
        SeqStep(slot, 0, len(PROMPT), [2 * slot, 2 * slot + 1], samples=slot == 0, pools=slot > 0)
        for slot in range(4)
    ]
    output = runner.launch(StepInput(1, new, rows)).result()
    assert not output.failed
    for slot, model in ((1, made[0]), (2, made[1])):
        found = torch.frombuffer(bytearray(output.pooled[slot].data), dtype=torch.float32)
        torch.testing.assert_close(found, model.logits(PROMPT).flatten(), atol=1e-4, rtol=0)


def test_tokens_are_not_labelled_where_their_states_are_not_kept(tmp_path: Path) -> None:
    base = tiny_checkpoint("LlamaForCausalLM", tmp_path / "base")
    model = transformers.AutoModelForTokenClassification.from_pretrained(base, num_labels=2)
    made = make_adapter(base, tmp_path / "a", model=model, task_type="TOKEN_CLS", target_modules=["q_proj"])
    returned = open_runner(base, lora=LORA).call(WorkerCall(1, READ_ADAPTER, [1, str(made.folder)]))
    assert "add --tasks generate embed token_embed" in returned.error


@torch.inference_mode()
def test_an_encoder_embeds_texts_by_different_adapters_in_a_step(tmp_path: Path) -> None:
    base = tiny_checkpoint("BertModel", tmp_path / "base")
    made = [
        make_adapter(
            base,
            tmp_path / str(seed),
            seed,
            model=transformers.BertModel.from_pretrained(base, dtype=torch.float32),
            task_type="FEATURE_EXTRACTION",
            target_modules=["query", "value", "intermediate.dense", "output.dense"],
        )
        for seed in (1, 2)
    ]
    served_as = Conversion(runner="pooling", convert="embed", architecture="BertModel")
    runner = open_runner(base, conversion=served_as, lora=LORA, dtype="float32")
    for number, each in enumerate(made, 1):
        assert not runner.call(WorkerCall(1, READ_ADAPTER, [number, str(each.folder)])).error
        assert not runner.call(WorkerCall(1, ENTER_ADAPTER, [number])).error
    params = Pooling("token_embed", use_activation=False)
    new = [NewSeq(slot, PROMPT, len(PROMPT), params, adapter=slot) for slot in range(3)]
    rows = [SeqStep(slot, 0, len(PROMPT), [], samples=False, pools=True) for slot in range(3)]
    output = runner.launch(StepInput(1, new, rows)).result()
    for slot, each in enumerate(made, 1):
        found = torch.frombuffer(bytearray(output.pooled[slot].data), dtype=torch.float32)
        expected = each.model(input_ids=torch.tensor([PROMPT])).last_hidden_state[0]
        torch.testing.assert_close(found, expected.flatten(), atol=1e-4, rtol=0)
