"""Every family on tiny random checkpoints has Hugging Face's logits, in whatever steps tokens arrive."""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from drive import Driver, load_ranks, run_in_chunks
from tiny import hf_logits, hf_model, tiny_checkpoint
from tiny_shapes import EXPERTS_BESIDE, SHARED_CACHES
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A case of the table: an architecture, and the unusual fields of its config.json."""

    architecture: str
    variant: str = ""
    overrides: dict[str, object] = field(default_factory=dict)
    ranks: tuple[int, ...] = (2, 4)

    def __str__(self) -> str:
        return f"{self.architecture}-{self.variant}" if self.variant else self.architecture


LONGROPE: dict[str, object] = {
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [4.0, 6.0, 8.0, 10.0],
        "factor": 8.0,
    }
}
YARN: dict[str, object] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}

SHARPENED: dict[str, object] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 8,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    }
}

NO_GROWTH: dict[str, object] = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "partial_rotary_factor": 0.4,
        "llama_4_scaling_beta": 0.0,
        "original_max_position_embeddings": 128,
    }
}

CASES = [
    Case("LlamaForCausalLM"),
    Case("LlamaForCausalLM", "yarn", YARN),
    Case("LlamaForCausalLM", "biased", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
    Case("LlamaForCausalLM", "odd vocabulary", {"vocab_size": 301, "tie_word_embeddings": True}),
    Case("MistralForCausalLM"),
    Case("MistralForCausalLM", "no window", {"sliding_window": None}),
    Case("Qwen2ForCausalLM"),
    Case("Qwen3ForCausalLM"),
    Case(
        "Qwen3ForCausalLM",
        "windows",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Case("Phi3ForCausalLM"),
    Case("Phi3ForCausalLM", "partial rotary", {"partial_rotary_factor": 0.5}),
    Case("Phi3ForCausalLM", "longrope, short", LONGROPE | {"original_max_position_embeddings": 512}),
    Case("Phi3ForCausalLM", "longrope, long", LONGROPE | {"original_max_position_embeddings": 16}),
    Case("GemmaForCausalLM"),
    Case("Gemma2ForCausalLM"),
    Case("Gemma3ForCausalLM"),
    Case("Gemma3nForCausalLM"),
    Case(
        "Gemma3nForCausalLM",
        "dense",
        {
            "activation_sparsity_pattern": None,
            "altup_num_inputs": 4,
            "altup_active_idx": 0,
            "altup_correct_scale": False,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": 320,
        },
    ),
    Case("Gemma4ForCausalLM"),
    Case("Gemma4ForCausalLM", "shared caches", SHARED_CACHES),
    Case("Gemma4ForCausalLM", "experts", EXPERTS_BESIDE),
    Case("Gemma4UnifiedForCausalLM"),
    Case("Olmo2ForCausalLM"),
    Case("GraniteForCausalLM"),
    Case("SmolLM3ForCausalLM"),
    Case("SmolLM3ForCausalLM", "windows", {"use_sliding_window": True, "sliding_window": 5}),
    Case("Olmo3ForCausalLM"),
    Case("Exaone4ForCausalLM"),
    Case("Exaone4ForCausalLM", "no windows", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    Case("SeedOssForCausalLM"),
    Case("SeedOssForCausalLM", "biased", {"attention_out_bias": True, "mlp_bias": True}),
    Case("ArceeForCausalLM"),
    Case("HeliumForCausalLM"),
    Case("GlmForCausalLM"),
    Case("Glm4ForCausalLM"),
    Case("Ernie4_5ForCausalLM"),
    Case("Ernie4_5ForCausalLM", "biased", {"use_bias": True}),
    Case("HunYuanDenseV1ForCausalLM"),
    Case("ApertusForCausalLM"),
    Case("CohereForCausalLM"),
    Case("CohereForCausalLM", "plain heads", {"use_qk_norm": False, "attention_bias": True}),
    Case("Cohere2ForCausalLM"),
    Case("StableLmForCausalLM"),
    Case(
        "StableLmForCausalLM",
        "parallel",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    Case("OlmoForCausalLM"),
    Case("Starcoder2ForCausalLM"),
    Case("NemotronForCausalLM"),
    Case("NemotronForCausalLM", "biased", {"attention_bias": True, "mlp_bias": True}),
    Case("PhiForCausalLM"),
    Case("GPTNeoXForCausalLM"),
    Case("GPTNeoXForCausalLM", "one after the other", {"use_parallel_residual": False}),
    Case("GPTJForCausalLM"),
    Case("FalconForCausalLM"),
    Case(
        "FalconForCausalLM",
        "two norms",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True},
        ranks=(2,),
    ),
    Case(
        "FalconForCausalLM",
        "one norm",
        {"new_decoder_architecture": True, "num_kv_heads": 4, "num_ln_in_parallel_attn": 1},
    ),
    Case(
        "FalconForCausalLM",
        "one after the other",
        {"multi_query": False, "parallel_attn": False, "tie_word_embeddings": False},
    ),
    Case("FalconForCausalLM", "alibi", {"multi_query": False, "parallel_attn": False, "alibi": True}),
    Case("FalconForCausalLM", "alibi, parallel", {"alibi": True, "bias": True}),
    Case("BloomForCausalLM"),
    Case("BloomForCausalLM", "five heads", {"n_head": 5, "hidden_size": 40}, ranks=(5,)),
    Case("MptForCausalLM"),
    Case("MptForCausalLM", "six heads", {"n_heads": 6, "d_model": 48, "attn_config": {}}, ranks=(2,)),
    Case("GPTBigCodeForCausalLM"),
    Case("GPTBigCodeForCausalLM", "many key heads", {"multi_query": False}),
    Case("MixtralForCausalLM"),
    Case("Qwen2MoeForCausalLM"),
    Case("Qwen2MoeForCausalLM", "normalised", {"norm_topk_prob": True, "mlp_only_layers": []}),
    Case("Qwen3MoeForCausalLM"),
    Case("Qwen3MoeForCausalLM", "not normalised", {"norm_topk_prob": False}),
    Case("OlmoeForCausalLM"),
    Case("GraniteMoeForCausalLM"),
    Case("GraniteMoeSharedForCausalLM"),
    Case("Glm4MoeForCausalLM"),
    Case("Dots1ForCausalLM"),
    Case("Dots1ForCausalLM", "normalised", {"norm_topk_prob": True}),
    Case("Ernie4_5_MoeForCausalLM"),
    Case("MiniMaxM2ForCausalLM"),
    Case("GptOssForCausalLM"),
    Case("Mistral4ForCausalLM"),
    Case(
        "Mistral4ForCausalLM",
        "halves",
        {"rope_interleave": False, "norm_topk_prob": False, "n_group": 1, "topk_group": 1} | NO_GROWTH,
    ),
    Case(
        "Mistral4ForCausalLM",
        "plain queries",
        {"q_lora_rank": None, "attention_bias": True, "first_k_dense_replace": 0},
    ),
    Case("DeepseekV2ForCausalLM"),
    Case("DeepseekV2ForCausalLM", "lite", {"topk_method": "greedy", "q_lora_rank": None} | SHARPENED),
    Case("DeepseekV3ForCausalLM"),
    Case("DeepseekV3ForCausalLM", "sharpened", {"attention_bias": True} | SHARPENED),
    Case(
        "DeepseekV3ForCausalLM",
        "halves",
        {
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    Case("DeepseekV32ForCausalLM"),
    Case("DeepseekV32ForCausalLM", "sharpened", {"attention_bias": True, "index_topk": 9} | SHARPENED),
    Case("DeepseekV32ForCausalLM", "all tokens", {"index_topk": 40}),
    Case("GlmMoeDsaForCausalLM"),
    Case("GlmMoeDsaForCausalLM", "every third", {"indexer_types": None, "index_topk_freq": 3}),
    Case("Glm4MoeLiteForCausalLM"),
    Case("YoutuForCausalLM"),
    Case("MiniCPM3ForCausalLM"),
    Case("Qwen3_5ForCausalLM"),
    Case(
        "Qwen3_5ForCausalLM",
        "every fourth",
        {
            "layer_types": None,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "linear_conv_kernel_dim": 2,
        },
    ),
    Case("Qwen3_5MoeForCausalLM"),
    Case("Qwen3NextForCausalLM"),
    Case("Qwen3NextForCausalLM", "an MLP", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    Case("Lfm2ForCausalLM"),
    Case(
        "Lfm2ForCausalLM", "biased", {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
    ),
    Case("Lfm2MoeForCausalLM"),
    Case("Lfm2MoeForCausalLM", "plain scores", {"use_expert_bias": False, "norm_topk_prob": False}),
    Case("BambaForCausalLM"),
    Case("BambaForCausalLM", "biased", {"mamba_proj_bias": True, "mamba_conv_bias": False}),
    Case("GraniteMoeHybridForCausalLM"),
    Case(
        "GraniteMoeHybridForCausalLM",
        "dense, with rope",
        {"num_local_experts": 0, "position_embedding_type": "rope", "time_step_limit": [0.2, 0.9]},
    ),
    Case("FalconH1ForCausalLM"),
    Case("FalconH1ForCausalLM", "gated norm", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    Case(
        "FalconH1ForCausalLM", "norm", {"mamba_rms_norm": True, "mamba_n_groups": 4, "projectors_bias": True}
    ),
    Case("NemotronHForCausalLM"),
    Case("NemotronHForCausalLM", "biased", {"use_bias": True, "mlp_bias": True, "n_groups": 2}, (2,)),
    Case("Mamba2ForCausalLM"),
    Case("Mamba2ForCausalLM", "one group", {"n_groups": 1, "use_bias": True, "use_conv_bias": False}),
    Case("MambaForCausalLM"),
    Case("MambaForCausalLM", "biased", {"use_bias": True, "use_conv_bias": False, "intermediate_size": 48}),
    Case("FalconMambaForCausalLM"),
    Case("JambaForCausalLM"),
    Case("JambaForCausalLM", "dense, biased", {"num_experts": 1, "mamba_proj_bias": True}),
    Case("KimiLinearForCausalLM"),
    Case("KimiLinearForCausalLM", "narrow queries", {"q_lora_rank": 20, "mlp_layer_types": ["sparse"] * 3}),
    Case("OlmoHybridForCausalLM"),
    Case(
        "OlmoHybridForCausalLM",
        "no positions",
        {"rope_parameters": {"rope_theta": None, "rope_type": "default"}, "linear_allow_neg_eigval": False},
    ),
    Case("GPT2LMHeadModel"),
    Case("GPT2LMHeadModel", "scaled by layer", {"scale_attn_by_inverse_layer_idx": True, "n_inner": None}),
    Case("GPT2LMHeadModel", "unscaled", {"scale_attn_weights": False, "tie_word_embeddings": False}),
    Case("OPTForCausalLM"),
    Case("OPTForCausalLM", "gelu", {"activation_function": "gelu"}),
    Case("OPTForCausalLM", "no final norm", {"_remove_final_layer_norm": True}),
    Case(
        "OPTForCausalLM",
        "norms after, no bias",
        {"do_layer_norm_before": False, "enable_bias": False, "word_embed_proj_dim": 32},
    ),
]

PROMPT = random.Random(1).choices(range(5, 300), k=23)
"""A prompt that is longer than the windows and no multiple of the chunks."""


@dataclass(frozen=True)
class Built:
    case: Case
    folder: Path
    expected: Tensor
    """Hugging Face's logits after each token of PROMPT."""


@pytest.fixture(scope="module", params=CASES, ids=str)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    case: Case = request.param
    folder = tiny_checkpoint(case.architecture, tmp_path_factory.mktemp("checkpoint"), **case.overrides)
    return Built(case, folder, hf_logits(folder, PROMPT))


def assert_equal(logits: Tensor, expected: Tensor) -> None:
    """Compare as strictly as Hugging Face's own two attention implementations agree on these models."""
    torch.testing.assert_close(logits.log_softmax(-1), expected.log_softmax(-1), atol=1e-4, rtol=0)
    assert logits.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_logits_are_worth_comparing(built: Built) -> None:
    """A model that predicts hardly anything, or the same everywhere, would pass the other tests by chance."""
    assert built.expected.std() > 0.3
    assert len(set(built.expected.argmax(-1).tolist())) > 3


def test_prompt_in_chunks(built: Built) -> None:
    for size in (1, 3, 7):
        driver = Driver(load_ranks(built.folder))
        assert_equal(run_in_chunks(driver, 2, PROMPT, size), built.expected)


def test_sequences_packed_into_steps(built: Built) -> None:
    """A whole prompt, others in pieces and continuations share steps, and each row is as if it were alone."""
    driver = Driver(load_ranks(built.folder))
    first = driver.step({3: PROMPT[:10], 1: PROMPT[:1], 0: PROMPT})
    second = driver.step({1: PROMPT[1:9], 3: PROMPT[10:11]})
    third = driver.step({3: PROMPT[11:], 2: PROMPT[:5], 1: PROMPT[9:]})
    assert_equal(first[0], built.expected)
    assert_equal(torch.cat([first[1], second[1], third[1]]), built.expected)
    assert_equal(torch.cat([first[3], second[3], third[3]]), built.expected)
    assert_equal(third[2], built.expected[:5])


def test_spread_over_ranks(built: Built) -> None:
    """Two ranks halve everything; four ranks share two key/value heads."""
    for size in built.case.ranks:
        driver = Driver(load_ranks(built.folder, size))
        assert_equal(run_in_chunks(driver, 0, PROMPT, 7), built.expected)


def test_bfloat16_is_as_near_to_float32_as_hugging_faces(built: Built) -> None:
    driver = Driver(load_ranks(built.folder, dtype=torch.bfloat16), dtype=torch.bfloat16)
    logits = driver.step({0: PROMPT})[0]
    assert logits.dtype == torch.float32
    theirs = hf_model(built.folder, torch.bfloat16)
    with torch.inference_mode():
        limit = 1.3 * distance(theirs(torch.tensor([PROMPT])).logits[0].float(), built.expected)
    assert 0 < distance(logits, built.expected) < limit


def test_nothing_is_left_on_the_host(built: Built) -> None:
    """Tensors on meta do not mix with the host's, so a model that runs there runs on CUDA."""
    driver = Driver(load_ranks(built.folder, device="meta"), device="meta")
    assert driver.step({0: PROMPT, 1: PROMPT[:2]})[1].is_meta
    assert driver.step({1: PROMPT[2:3], 0: PROMPT})[1].is_meta


@pytest.mark.parametrize("scale", [0.25, "inv_sqrt_d_model"])
def test_logits_of_mpt_are_scaled(scale: object, tmp_path: Path) -> None:
    """The code of its makers does so, and transformers' does not."""
    folder = tiny_checkpoint("MptForCausalLM", tmp_path, logit_scale=scale)
    logits = Driver(load_ranks(folder)).step({0: PROMPT})[0]
    factor = 32**-0.5 if isinstance(scale, str) else 0.25
    torch.testing.assert_close(logits, factor * hf_logits(folder, PROMPT), atol=1e-4, rtol=0)


def distance(logits: Tensor, expected: Tensor) -> float:
    """The distance of the middle token: where two experts nearly tie, a digit may choose another one."""
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median())


@pytest.mark.parametrize(
    ("architecture", "built_with", "published_with"),
    [
        ("Qwen2ForCausalLM", {}, {}),
        ("Gemma2ForCausalLM", {}, {}),
        ("SmolLM3ForCausalLM", {"use_sliding_window": True, "sliding_window": 5}, {}),
        (
            "Gemma3ForCausalLM",
            {},
            {
                "sliding_window_pattern": 2,
                "rope_theta": 1000000.0,
                "rope_local_base_freq": 10000.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "rope_parameters": None,
            },
        ),
    ],
)
def test_config_as_first_published(
    architecture: str, built_with: dict[str, object], published_with: dict[str, object], tmp_path: Path
) -> None:
    """Each family had its own rule for the kinds of layers before configs listed them."""
    folder = tiny_checkpoint(architecture, tmp_path, **built_with)
    expected = hf_logits(folder, PROMPT)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | published_with
    del config["layer_types"]
    path.write_text(json.dumps(config))
    assert_equal(Driver(load_ranks(folder)).step({0: PROMPT})[0], expected)
