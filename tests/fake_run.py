"""A run without a model: what `run_step` needs, for groups of given rewards."""

import types

import numpy as np
from rollout_fakes import ScriptedPool, key
from toy_stream import MEAN, weighted

from thundersync_jax import GradientStream
from thundersync_jax.config import LossConfig
from thundersync_jax.metrics.learner_clock import Totals
from thundersync_jax.rollout.events import Job
from thundersync_jax.run.step import run_step

SIZE = 4  # members of a group


class FakeRun:
    """Member m of group g scores 1 in place (g, m), so a gradient lists advantages."""

    def __init__(
        self, pool, first, bound=None, uniform_groups="replace", share=1.0, spares=0
    ):
        self.pool, self.members = pool, SIZE + spares
        most = first if bound is None else bound
        self.config = types.SimpleNamespace(
            loss=LossConfig(),
            partial_groups="drop",
            uniform_groups=uniform_groups,
            most_replacements=most if uniform_groups == "replace" else 0,
            rollout=types.SimpleNamespace(
                groups_per_step=first,
                failed_share_limit=share,
                spare_members=spares,
            ),
        )
        self.clock = types.SimpleNamespace(take=list, totals=Totals(0, 0.0))
        self.timeline = types.SimpleNamespace(add=lambda span: None)
        self.groups = first + most
        self.judged, self.teacher_tokens = True, 0
        self.compile_sampler = lambda: None
        self.samples = types.SimpleNamespace(
            prompt=lambda step, group: None,
            whole=self.whole,
            shaped_reward=lambda trajectory: trajectory.reward,
        )

    def train_jobs(self, step):
        groups = range(self.config.rollout.groups_per_step)
        return [job for group in groups for job in self.replacement_jobs(step, group)]

    def replacement_jobs(self, step, group):
        return [self.spare_job(step, group, member) for member in range(SIZE)]

    def spare_job(self, step, group, member):
        return Job(key(member, group, step), None)

    def group_baseline(self, step, group):
        return 0.0

    def whole(self, trajectory, start=0, end=None):
        score = np.zeros((self.groups, self.members), np.float32)
        score[trajectory.key.group, trajectory.key.member] = 1.0
        return {"s": score}

    def new_stream(self, **settings):
        uniform = "keep" if self.config.uniform_groups == "keep" else "drop"
        return GradientStream(
            weighted,
            {"x": np.zeros((self.groups, self.members), np.float32)},
            **{"estimator": MEAN, "uniform_groups": uniform} | settings,
        )


def rolled(run, step=1, progress=None, **settings):
    """Returns the gradient [groups, members] and the step."""
    stream = run.new_stream(**settings)
    done = run_step(run, stream, run.train_jobs(step), 0, progress)
    assert not run.pool.outstanding
    return np.asarray(done.gradient["x"]), done


def pool_of(rewards):
    return ScriptedPool(rewards, np.random.default_rng(0))
