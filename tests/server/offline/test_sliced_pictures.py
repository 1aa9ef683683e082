"""A tiny MiniCPM-V answers about pictures that are cut into slices as the parts that it is composed of."""

import json
from pathlib import Path

from media_files import noise
from minicpmv import Composed
from pictured import Prompt
from pictured_chat import write_chat_files

from server.offline.llm import LLM
from server.requests.sampling_params import SamplingParams
from worker.protocol import MediaPlace

NAMES = ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}"


def test_slices_and_numbers_of_pictures_are_written_as_its_authors_do(tmp_path: Path) -> None:
    model = Composed("2.6", tmp_path)
    tokenizer = write_chat_files(tmp_path, {310 + n: name for n, name in enumerate(NAMES)}, "")
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    small, high = noise(40, 40), noise(60, 100)
    whole, one = f"<image>{'<unk>' * 3}</image>", f"<slice>{'<unk>' * 3}</slice>"
    text = f"user: <image_id>0</image_id>{whole}\nand\n<image_id>1</image_id>{whole}{one}\n{one} "
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    runs = tuple((place, 1) for place, token in enumerate(ids) if token == 310)
    places = (MediaPlace(number=0, kind="image", at=0, length=len(ids), runs=runs, grid=(1, 1, 1)),)
    talk = [
        {
            "role": "user",
            "content": [
                {"type": "image_pil", "image_pil": small},
                {"type": "text", "text": "and"},
                {"type": "image_pil", "image_pil": high},
            ],
        }
    ]
    with LLM(str(tmp_path), dtype="float32", num_gpu_blocks_override=100, max_num_seqs=2) as llm:
        [answer] = llm.chat([talk], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert answer.prompt_token_ids == ids
    assert answer.outputs[0].token_ids == model.expected(Prompt(ids, [small, high], places), 6).tokens
