"""Plans of transformers models from their configurations: one layer of each kind, and a Llama of 7B parameters."""

import re
import resource
import subprocess
import sys
import textwrap

import pytest
import torch

import recompile

transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("fresh_dynamo"), pytest.mark.slow]

SMALL = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
TOKENS = {"input_ids": torch.Size([2, 32]), "labels": torch.Size([2, 32])}


def of(kind, config, **settings):
    with torch.device("meta"):
        return getattr(transformers, kind)(getattr(transformers, config)(**settings)).train()


MODELS = {
    "gpt2": lambda: (of("GPT2LMHeadModel", "GPT2Config", n_layer=1, n_embd=64, n_head=4, vocab_size=100), TOKENS),
    "llama": lambda: (
        of("LlamaForCausalLM", "LlamaConfig", num_hidden_layers=1, num_key_value_heads=2, **SMALL), TOKENS,
    ),
    "bert": lambda: (of("BertForMaskedLM", "BertConfig", num_hidden_layers=1, **SMALL), TOKENS),
    "vit": lambda: (
        of("ViTForImageClassification", "ViTConfig", num_hidden_layers=1, image_size=32, patch_size=8,
           **{key: value for key, value in SMALL.items() if key != "vocab_size"}),
        {"pixel_values": torch.empty(2, 3, 32, 32, device="meta"), "labels": torch.Size([2])},
    ),
    "t5": lambda: (
        of("T5ForConditionalGeneration", "T5Config", num_layers=1, d_model=64, num_heads=4, d_ff=128, d_kv=16,
           vocab_size=100, decoder_start_token_id=0), TOKENS,
    ),
    "mixtral": lambda: (
        of("MixtralForCausalLM", "MixtralConfig", num_hidden_layers=1, num_key_value_heads=2, num_local_experts=4,
           **SMALL), TOKENS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_one_layer_of_each_is_planned_and_its_peak_falls_with_the_budget(name):
    model, batch = MODELS[name]()
    peaks = []
    for budget in (None, 0.0):
        explanation = recompile.plan(
            model, **batch, hardware="h100", memory_budget=budget, loss=lambda result: result.loss, program=False
        )
        peaks.append(explanation.peak_bytes)
    assert 0 < peaks[1] <= peaks[0]


SEVEN_BILLION = """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(batch, length):
        config = LlamaConfig(hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32,
                             num_key_value_heads=32, vocab_size=32000, use_cache=False)
        tokens = torch.zeros(batch, length, dtype=torch.long)
        return LlamaForCausalLM(config).to(torch.bfloat16).train(), {"input_ids": tokens, "labels": tokens}
"""


def test_a_llama_of_7b_parameters_is_planned_in_less_than_4_gib(tmp_path):
    (tmp_path / "seven_billion.py").write_text(textwrap.dedent(SEVEN_BILLION))
    command = "plan seven_billion:build --batch 1x4096 --hardware h100 --loss-attribute loss --no-program"
    done = subprocess.run(
        [sys.executable, "-m", "recompile", *command.split()], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert re.search(r"^parameters +12\.55 GiB$", done.stdout, re.MULTILINE)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB
