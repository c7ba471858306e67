"""Settings of distillation that contradict each other, or would have no effect."""

import dataclasses

import pytest

from thundersync_jax.config import (
    Config,
    LossConfig,
    MeshConfig,
    RolloutConfig,
    TeacherConfig,
)
from thundersync_jax.errors import ConfigError

OPD = LossConfig(advantage="none", distill="sampled_reverse_kl")
BOTH = LossConfig(distill="reverse_kl", distill_coef=0.5)
TEACHER = TeacherConfig(workdir="runs/teacher")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"release": "group"}, "release is 'group' with loss.advantage 'none'"),
        ({"teacher": TeacherConfig()}, "teacher.workdir none"),
        ({"loss": LossConfig()}, "nobody asks the teacher"),
        ({"uniform_groups": "drop"}, "no rewards in the loss that could be equal"),
        ({"release": "turn", "loss": BOTH}, "a second sum per trajectory"),
        ({"release": "turn", "accumulator": "exact"}, "the programs of turns"),
        ({"loss": BOTH, "open_trajectories": 4}, "only release 'turn' uses it"),
        ({"open_trajectories": 0}, "open_trajectories is 0, expected more than 0"),
        (
            {"share_prompt": "group", "rollout": RolloutConfig(group_size=1)},
            "nobody is there to share it with",
        ),
        (
            {
                "share_prompt": "group",
                "accumulator": "exact",
                "mesh": MeshConfig(replica=2),
            },
            "each would round its own share of a prompt",
        ),
        (
            {"loss": BOTH, "rollout": RolloutConfig(segment_buckets=(96,))},
            "nothing is computed in pieces",
        ),
    ],
)
def test_contradictions_end_in_one_line(settings, wanted):
    with pytest.raises(ConfigError, match=wanted) as found:
        Config(**{"loss": OPD, "teacher": TEACHER} | settings)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"distill": "none"}, "something to learn from: rewards, or a teacher"),
        ({"distill_coef": 0.5}, "loss.distill_coef is 0.5 with loss.advantage 'none'"),
        ({"distill_top_k": 4}, "loss.distill_top_k is 4 with loss.distill"),
        ({"distill_top_k": 0, "distill": "reverse_kl"}, "distill_top_k is 0"),
        ({"importance_cap": 2.0}, "importance_cap is 2.0 with loss.advantage 'none'"),
        ({"length_penalty": 0.5}, "length_penalty is 0.5 with loss.advantage 'none'"),
        ({"distill": "reverse"}, "loss.distill is 'reverse'"),
    ],
)
def test_a_loss_without_rewards_refuses_what_would_not_act(settings, wanted):
    with pytest.raises(ConfigError, match=wanted):
        dataclasses.replace(OPD, **settings)


def test_teacher_settings_need_a_teacher():
    with pytest.raises(ConfigError, match=r"teacher.device is 'sampler' with"):
        TeacherConfig(device="sampler")


@pytest.mark.parametrize(
    ("settings", "releases"),
    [
        ({}, ("batch", "trajectory", "turn")),
        ({"accumulator": "exact"}, ("batch", "trajectory")),
        ({"loss": BOTH}, ("batch", "group", "trajectory")),
    ],
)
def test_release_rules_follow_from_the_loss(settings, releases):
    config = Config(**{"loss": OPD, "teacher": TEACHER} | settings)
    assert config.releases == releases
