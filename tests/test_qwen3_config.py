"""The config of a published model trains a tiny random one of the same family."""

import dataclasses
import json
import pathlib
import sys

import chat_folders
import jax
import pytest

from thundersync_jax import flags, show, train
from thundersync_jax.config import Config
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.errors import ConfigError
from thundersync_jax.hf import weights
from thundersync_jax.metrics.records import read_step
from thundersync_jax.models import transformer

CONFIG = pathlib.Path(__file__).parents[1] / "configs" / "qwen3_0_6b.py"
TINY = ModelConfig(
    vocab_size=512,
    layers=1,
    width=16,
    mlp_width=32,
    heads=2,
    kv_heads=1,
    head_dim=8,
    qk_norm=True,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = chat_folders.write(tmp_path_factory.mktemp("model"), "qwen3")
    ends = json.loads((path / "generation_config.json").read_text())
    params = jax.jit(lambda key: transformer.init(TINY, key))(jax.random.key(0))
    weights.save(path, TINY, params, generation=ends, tokenizer_from=path)
    return path


@pytest.fixture
def on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("quick_programs", "on_path")
def test_a_tiny_model_of_the_family_trains(folder, tmp_path, capsys):
    config = flags.load_config(f"{CONFIG}:{folder}")
    assert dataclasses.replace(config.model, path=None, dtype="float32") == TINY
    changes = {
        "steps": 2,
        "model.dtype": "float32",
        "rollout.groups_per_step": 2,
        "rollout.group_size": 4,
        "rollout.slots": 8,
        "rollout.turn_tokens": 8,
        "rollout.turns": 2,
        "rollout.cut_actions": "run",
        "rollout.prefill_buckets": (1024,),
        "rollout.gradient_buckets": (1024,),
        "evaluation.questions": 2,
        "env.options.train_tasks": 24,
        "env.options.heldout_tasks": 6,
    }
    result = train.train(replace(config, changes), tmp_path / "run")
    assert result["steps"] == 2
    _, records = read_step(tmp_path / "run", 2)
    asked = records[0].prompt_text
    assert "calculator" in asked and asked.endswith("<think>\n\n</think>\n\n")
    assert [record.text.count("<|im_start|>system") for record in records] == [1] * 8
    capsys.readouterr()
    show.show(tmp_path / "run", group=0, member=0)
    assert '"name": "calculator"' in capsys.readouterr().out.replace("\n", "")


@pytest.mark.usefixtures("on_path")
def test_context_beyond_the_models_is_refused(folder, tmp_path):
    config = flags.load_config(f"{CONFIG}:{folder}")
    changes = {
        "rollout.context_tokens": 40_000,
        "rollout.prefill_buckets": (40_000,),
        "rollout.gradient_buckets": (40_000,),
    }
    with pytest.raises(ConfigError, match="context_tokens is 40000 .* most 32768"):
        train.train(replace(config, changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("on_path")
def test_without_a_folder_there_is_the_shape_alone():
    config = flags.load_config(str(CONFIG))
    parameters = jax.eval_shape(
        lambda key: transformer.init(config.model, key), jax.random.key(0)
    )
    assert sum(x.size for x in jax.tree.leaves(parameters)) == 596_049_920
    assert config.chat == Config().chat
