"""Folders that transformers wrote and reads, against its own models on torch."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from tiny_models import shardings

from thundersync_jax.config.model import ModelConfig
from thundersync_jax.hf import weights
from thundersync_jax.models import transformer

WHY = "needs the extra test-hf (torch and transformers)"
torch = pytest.importorskip("torch", reason=WHY)
transformers = pytest.importorskip("transformers", reason=WHY)

pytestmark = [
    pytest.mark.usefixtures("quick_programs"),
    # Of the libraries, about themselves.
    pytest.mark.filterwarnings("default"),
]

# Both sides add a few hundred float32 products in other orders.
LOGITS = 1e-4
TOKENS = np.random.default_rng(1).integers(0, 48, 40, np.int32)
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def rope(kind, theta, **numbers):
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **numbers}}


# Contexts of pretraining shorter than TOKENS, so that scalings matter.
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
UNROUNDED = {"attention_factor": 1.3, "beta_fast": 8.0, "truncate": False}
TIED = {"tie_word_embeddings": True}
CASES = {
    "Llama 3.1": ("Llama", rope("llama3", 5e5, **LLAMA3)),
    "Llama 3.2": ("Llama", {**rope("llama3", 5e5, **LLAMA3), **TIED}),
    "linear": ("Llama", {**rope("linear", 1e4, factor=2.0), "head_dim": 16}),
    "Qwen 2": ("Qwen2", {**rope("default", 1e6), **TIED}),
    "Qwen 2.5": ("Qwen2", {**rope("yarn", 1e6, **YARN), "rms_norm_eps": 1e-5}),
    "Qwen 3": ("Qwen3", {**rope("default", 1e6), **TIED}),
    "Qwen 3 long": ("Qwen3", {**rope("yarn", 1e4, **YARN, **UNROUNDED), "head_dim": 8}),
}


def torch_model(case):
    """A tiny model whose scales are not 1 and whose biases are not 0."""
    family, settings = CASES[case]
    config = getattr(transformers, f"{family}Config")(**SIZES, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


def torch_logits(model):
    with torch.no_grad():
        return model(torch.tensor(TOKENS[None].astype(np.int64))).logits[0].numpy()


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
    hidden, _ = transformer.segment(config, params, tokens)
    return transformer.logits(config, transformer.head_weights(params), hidden)


@pytest.mark.parametrize("case", CASES)
def test_a_folder_gives_the_logits_of_transformers_and_survives(case, tmp_path):
    theirs, ours, again = tmp_path / "theirs", tmp_path / "ours", tmp_path / "again"
    model = torch_model(case)
    model.save_pretrained(theirs, max_shard_size="20KB")
    assert len(list(theirs.glob("*.safetensors"))) > 2
    expected = torch_logits(model)
    assert np.abs(expected).max() > 1

    config = ModelConfig(path=str(theirs))
    params = weights.load(theirs, config, shardings(config))
    got = logits(config, params, TOKENS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=LOGITS)

    # Saved without its folder: all comes from the settings.
    alone = dataclasses.replace(config, path=None)
    weights.save(ours, alone, params, most_shard_bytes=25_000)
    loaded = getattr(transformers, f"{CASES[case][0]}ForCausalLM")
    loaded = loaded.from_pretrained(ours, dtype=torch.float32).eval()
    np.testing.assert_array_equal(torch_logits(loaded), expected)

    assert dataclasses.replace(config, path=str(ours)) == dataclasses.replace(
        alone, path=str(ours)
    )
    weights.save(
        again, config, weights.load(ours, config, shardings(config, (1, 8, 1)))
    )
    read = weights.load(again, config, shardings(config, (1, 1, 4)))
    jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_goes_both_ways(dtype, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    torch_model("Qwen 2").to(getattr(torch, dtype)).save_pretrained(theirs)
    config = ModelConfig(path=str(theirs))
    params = weights.load(theirs, config, shardings(config))
    # Read anew: casting a model back would leave its rotary frequencies rounded.
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs, dtype="float32")
    expected = torch_logits(model.eval())
    got = logits(config, params, TOKENS)
    np.testing.assert_allclose(got, expected, rtol=0, atol=LOGITS)
    weights.save(ours, config, params, dtype)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(ours, dtype="auto")
    assert loaded.dtype == getattr(torch, dtype)
    values = model.state_dict()
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.float(), values[name]), name


def test_both_spellings_of_config_json_are_read_alike(tmp_path):
    """transformers 4 wrote rope_theta and rope_scaling."""
    torch_model("Qwen 2.5").save_pretrained(tmp_path)
    new = ModelConfig(path=str(tmp_path))
    values = json.loads((tmp_path / "config.json").read_text())
    given = values.pop("rope_parameters")
    values |= {"rope_theta": given.pop("rope_theta"), "rope_scaling": given}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert ModelConfig(path=str(tmp_path)) == new
    expected = torch_logits(torch_model("Qwen 2.5"))
    read = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path).eval()
    np.testing.assert_array_equal(torch_logits(read), expected)
