"""SGLang's own body of /generate."""

from __future__ import annotations

from pydantic import Field, ValidationInfo, model_validator

from server.errors import BadRequest
from server.schemas.body import UNSUPPORTED, Flag, ForeignField
from server.schemas.unknown_fields import FieldNotes
from server.schemas.vendor_bodies.llama_cpp import PlainCompletion


class GenerateRequest(PlainCompletion):
    """`text` or `input_ids`, with the parameters of sampling in `sampling_params`."""

    unsupported = {
        **UNSUPPORTED,
        **dict.fromkeys(("image_data", "video_data", "audio_data", "input_embeds", "session_params"), ()),
        "return_hidden_states": (False,),
        "logprob_start_len": (-1,),
    }
    other_names = {
        **PlainCompletion.other_names,
        "text": "prompt",
        "input_ids": "prompt",
        "no_stop_trim": "include_stop_str_in_output",
    }
    foreign = {
        **PlainCompletion.foreign,
        "return_logprob": ForeignField(lambda value, notes: {"logprobs": 0} if value else {}, "logprobs"),
        "top_logprobs_num": ForeignField(
            lambda value, notes: {"logprobs": value} if value else {}, "logprobs, so many more than drawn."
        ),
    }

    max_tokens: int | None = Field(
        default=128, description="`max_new_tokens` in `sampling_params`; 0 has the prompt cached."
    )
    is_batch: Flag = Field(default=False, description="Answer with a list, as where `text` is one.")

    @model_validator(mode="before")
    @classmethod
    def read_theirs(cls, body: object, info: ValidationInfo) -> object:
        """The body with the parameters of sampling beside the other fields."""
        if not isinstance(body, dict):
            return body
        if not any(body.get(name) is not None for name in ("text", "input_ids", "prompt")):
            raise BadRequest("Give a text as `text`, or its tokens as `input_ids`.", "text")
        params = body.get("sampling_params") or {}
        if not isinstance(params, dict):
            raise BadRequest("`sampling_params` is one object, for all texts.", "sampling_params")
        ids = body.get("input_ids") or [0]
        is_list = isinstance(body.get("text"), list) or (isinstance(ids, list) and isinstance(ids[0], list))
        rest = {name: value for name, value in body.items() if name != "sampling_params"}
        if isinstance(notes := info.context, FieldNotes):
            notes.paths |= {name: f"sampling_params.{name}" for name in params}
        return {**rest, **params, **({"is_batch": True} if is_list else {})}
