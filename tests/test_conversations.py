"""The example conversations train, as bytes and in the forms of published templates."""

import json
import pathlib
import sys

import chat_folders
import jax
import numpy as np
import pytest

from thundersync_jax import flags, train
from thundersync_jax.chat.templates import TemplateChat
from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.hf import weights
from thundersync_jax.metrics.records import read_step
from thundersync_jax.metrics.writer import read
from thundersync_jax.models import transformer

pytestmark = pytest.mark.usefixtures("quick_programs")
CONFIGS = pathlib.Path(__file__).parents[1] / "configs"
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
SMALL = {
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "rollout.slots": 8,
    "rollout.cut_actions": "run",
    "evaluation.every_steps": 0,
    "warm_start.batch_size": 4,
    "model.layers": 1,
}
# Of a template around the same words.
ROOM = {
    "rollout.context_tokens": 1024,
    "rollout.prefill_buckets": (1024,),
    "rollout.gradient_buckets": (1024,),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A tiny random model with the tokenizer and template of each family."""
    made = {}
    for family in ("qwen3", "llama3"):
        path = chat_folders.write(tmp_path_factory.mktemp(family), family)
        ends = json.loads((path / "generation_config.json").read_text())
        params = jax.jit(lambda key: transformer.init(TINY, key))(jax.random.key(0))
        weights.save(path, TINY, params, generation=ends, tokenizer_from=path)
        made[family] = path
    return made


@pytest.mark.parametrize("form", ["bytes", "qwen3", "llama3"])
@pytest.mark.parametrize(
    "name", ["guess", "simulated_user", "three_tools", "compaction"]
)
def test_an_example_trains(name, form, folders, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = CONFIGS / f"{name}.py"
    assert len(file.read_text().splitlines()) <= 80
    changes = dict(SMALL)
    if form != "bytes":
        del changes["model.layers"]
        changes |= ROOM | {"model.path": str(folders[form])}
    config = flags.load_config(f"{file}:smoke")
    changes["warm_start.steps"] = min(config.warm_start.steps, 2)
    config = replace(config, changes)
    result = train.train(config, tmp_path)
    assert result["steps"] == 2
    _, records = read_step(tmp_path, 2)
    assert len(records) == 8
    prompt = records[0].prompt_text
    own = {
        "guess": "guess",
        "simulated_user": "copy",
        "three_tools": "-2(",
        "compaction": "=",
    }
    assert own[name] in prompt
    if form != "bytes" and name == "three_tools":
        assert all(
            f'"name": "{tool}"' in prompt for tool in ("add", "double", "negate")
        )
    turns = [record.trajectory.turns for record in records]
    assert name != "three_tools" or max(turns) >= 1
    if name == "compaction":  # actions that are cut are run: all see two summaries
        samples = [len(record.trajectory.samples) for record in records]
        assert turns == [5] * 8 and samples == [3] * 8


def test_a_run_trains_what_follows_histories_without_thoughts(
    folders, tmp_path, monkeypatch
):
    """Without a policy that thinks: an empty thought in the prompt leaves, too."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    changes = SMALL | {"model.path": str(folders["qwen3"]), "warm_start.steps": 0}
    del changes["model.layers"]
    changes |= {"chat.drop_thoughts": True, "chat.thinking": "off"}
    changes |= {"rollout.context_tokens": 192, "rollout.gradient_buckets": (192,)}
    config = flags.load_config(f"{CONFIGS / 'simulated_user.py'}:smoke")
    train.train(replace(config, changes | {"rollout.samples": 2}), tmp_path)
    _, records = read_step(tmp_path, 2)
    vocabulary = TemplateChat(folders["qwen3"]).vocabulary()
    thought, closed = vocabulary["<think>"], vocabulary["</think>"]
    for one in (record.trajectory for record in records):
        assert one.turns == len(one.samples) == 2
        (_, end), (start, _) = one.samples
        place = one.ids.tolist().index(thought)
        action = one.ids[:end][one.loss_mask[:end]]
        behind = 1 + max(np.flatnonzero(action == closed), default=-1)
        expected = np.concatenate([one.ids[:place], action[behind:]])
        history = one.ids[start : start + len(expected)]
        np.testing.assert_array_equal(history, expected)
    for row in read(tmp_path)[1:]:
        assert row["gradient_norm"] > 0 and row["mismatch_max"] < 1e-3
        assert row["tokens"] == row["action_tokens_mean"] * row["kept_members"]
