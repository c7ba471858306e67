"""Exact sums: every variant from its own parameters, and the same bits at the end."""

import dataclasses

import echo_task
import jax
import numpy as np
import pytest

from thundersync_jax import verify as verify_module
from thundersync_jax.config import EnvConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.envs.letters import LettersOptions
from thundersync_jax.measure import replay as comparison
from thundersync_jax.measure.replay import FreeRun, Variant
from thundersync_jax.run import state
from thundersync_jax.run.run import Run
from thundersync_jax.verify import verify
from thundersync_jax.view.display import Display

# Random weights are enough: some of their bytes are letters.
CONFIG = replace(
    echo_task.small(warm_start_steps=0),
    {
        "accumulator": "exact",
        "env": EnvConfig(
            factory="thundersync_jax.envs.letters:make",
            options=LettersOptions(
                prompt_tokens=8,
                calls=(0, 1),
                observation_tokens=(3, 4),
                train_tasks=16,
                verdict="any",
            ),
        ),
        "rollout.group_size": 6,
        "rollout.turn_tokens": 4,
        "rollout.cut_actions": "run",
        "open_groups": 2,
    },
)


def test_all_variants_end_with_the_same_bits(tmp_path, capsys):
    result = verify(CONFIG, tmp_path, steps=2, orders=2)
    assert result["passed"] and result["identical"], result
    names = {"batch", "group", "trajectory", "order 1", "order 2"}
    assert result["sha256"] == dict.fromkeys(names, result["sha256_of_all"])
    assert result["difference"] is None
    assert 0 < result["max_relative_difference"] <= 1e-5  # of plain sums, which round
    assert result["nonzero_groups"] >= 0.5
    assert result["streamed_share"] >= 0.5
    said = capsys.readouterr().out
    assert said.count(result["sha256_of_all"]) == 5
    assert said.splitlines()[-1] == "2 steps, 5 variants: identical"


def test_plain_sums_in_their_place_are_found_and_named(tmp_path, monkeypatch, capsys):
    """What exact sums are for: the order of arrival is in the bits of plain ones."""
    right = Run.new_stream

    def plain(self, params, version, release=None, rows=0, accumulator=None):
        return right(self, params, version, release, rows, "plain")

    monkeypatch.setattr(Run, "new_stream", plain)
    result = verify(CONFIG, tmp_path, steps=2, orders=1)
    assert not result["identical"] and not result["passed"]
    assert result["untested"] is None and result["sha256_of_all"] is None
    assert result["difference"]["step"] == 1
    assert result["difference"]["leaf"].startswith(".gradient[")
    assert result["difference"]["variant"] in ("group", "trajectory", "order 1")
    assert "FAILED" in capsys.readouterr().out.splitlines()[-1]


def test_one_bit_of_one_leaf_is_named_with_its_step(tmp_path, monkeypatch):
    right = comparison.replay

    def flipped(run, params, events, release, *rest, **named):
        done = right(run, params, events, release, *rest, **named)
        if release != "group" or events[0][1].key.step != 2:
            return done
        scale = done.gradient["final_norm"]
        bits = np.asarray(scale).view(np.int32) ^ np.eye(1, scale.size, dtype=np.int32)
        gradient = done.gradient | {"final_norm": bits[0].view(np.float32)}
        return dataclasses.replace(
            done, gradient=jax.device_put(gradient, _layout(done.gradient))
        )

    monkeypatch.setattr(comparison, "replay", flipped)
    result = verify(CONFIG, tmp_path, releases=("batch", "trajectory", "group"))
    assert result["difference"] == {
        "step": 2,
        "leaf": ".gradient['final_norm']",
        "variant": "group",
    }
    assert len(set(result["sha256"].values())) == 2


def _layout(tree):
    return jax.tree.map(lambda x: x.sharding, tree)


def test_every_variant_samples_with_its_own_parameters(tmp_path, monkeypatch):
    """Nothing is shared between variants, and nothing is done twice."""
    sampled, replayed = [], []
    roll_out, replay = comparison.roll_out, comparison.replay

    def watched_roll_out(run, step, version):
        sampled.append((step, version, run.published))
        return roll_out(run, step, version)

    def watched_replay(run, params, events, release, *rest, **named):
        if named.get("accumulator") is None:
            replayed.append(params)
        return replay(run, params, events, release, *rest, **named)

    def publish(self, params, version):
        self.published = params
        right(self, params, version)

    right = Run.publish
    monkeypatch.setattr(comparison, "roll_out", watched_roll_out)
    monkeypatch.setattr(comparison, "replay", watched_replay)
    monkeypatch.setattr(Run, "publish", publish)
    verify(CONFIG, tmp_path, steps=2, orders=1)
    assert [(step, version) for step, version, _ in sampled] == [(1, 0), (2, 1)] * 4
    for (*_, published), params in zip(sampled, replayed, strict=True):
        assert published is params


def test_tracked_baselines_belong_to_the_variant(tmp_path):
    changes = {"loss.advantage": "tracked_baseline", "rollout.groups_per_step": 16}
    with Run(replace(CONFIG, changes), tmp_path, on_line=lambda line: None) as run:
        start = state.init(run.optimizer, run.initial_params())
        update = state.Update(run.optimizer, run.config.optim.clip_norm, start)
        before = run.baselines.state()
        # 16 tasks and as many groups: in the second step every prompt is known.
        runs = [
            comparison.run_freely(run, Display(), variant, start, update, 2)
            for variant in comparison.variants(("batch", "trajectory"), 1)
        ]
        assert run.baselines.state() == before
    assert comparison.first_difference(runs) is None


def free_run(name, *steps, **figures):
    figures = {
        "streamed_shares": [1.0],
        "nonzero_groups": [1.0],
        "plain_differences": [1e-7],
    } | figures
    digests = [dict(zip("abc", step, strict=False)) for step in steps]
    return FreeRun(Variant(name, name), digests, sha256=str(steps[-1]), **figures)


@pytest.mark.parametrize(
    ("others", "first"),
    [
        ([("group", "111", "222")], None),
        ([("group", "111", "223"), ("trajectory", "111", "322")], (2, "c", "group")),
        ([("group", "111", "223"), ("trajectory", "121", "222")], (1, "b", "trajec")),
        ([("group", "11", "222")], (1, "c", "group")),  # a leaf that is not there
    ],
)
def test_first_difference_is_the_earliest_step_and_leaf(others, first):
    runs = [free_run("batch", "111", "222"), *(free_run(*one) for one in others)]
    found = comparison.first_difference(runs)
    assert (found and (found.step, found.leaf, found.variant[:6])) == (
        first and (*first[:2], first[2][:6])
    )


@pytest.mark.parametrize(
    "figures",
    [
        {"plain_differences": [1e-7, 2e-5]},  # the same bits, and the wrong ones
        {"plain_differences": [np.nan]},
        {"nonzero_groups": [1.0, 0.4]},
        {"streamed_shares": [1.0, 0.4]},
        {"streamed_shares": [np.nan]},
    ],
)
def test_every_bound_of_the_verdict_can_fail_it(figures):
    def judged(**figures):
        names = ("batch", "trajectory")
        return verify_module._judge_bits(
            [free_run(name, "1", "2", **figures) for name in names]
        )

    assert judged()["passed"]
    found = judged(**figures)
    assert found["identical"] and not found["passed"]
