"""Fields of tiny configs, by architecture: windows are shorter than a prompt, query heads share key heads."""

from shape_files import read_shapes

SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>")
BOS_ID, EOS_ID, PAD_ID, TURN_ID, TURN_END_ID = range(len(SPECIALS))

_DECODERS = read_shapes("decoders")
FAMILIES: dict[str, dict[str, object]] = {
    name: fields for name, fields in _DECODERS.items() if name.endswith(("ForCausalLM", "LMHeadModel"))
}
SHARED_CACHES = _DECODERS["shared_caches"]
"""What small Gemma 4 models have: late layers that read caches of others, and vectors for layers."""
EXPERTS_BESIDE = _DECODERS["experts_beside"]
"""What a Gemma 4 with experts beside its MLPs has."""

ENCODER_SHAPES: dict[str, dict[str, object]] = {
    name: fields for name, fields in read_shapes("encoders").items() if name[0].isupper()
}
"""Fields of encoders, by the beginning of their architectures' names."""
