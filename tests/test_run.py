"""What a run refuses before it begins, and what it survives."""

import asyncio
import dataclasses
import json
import re

import echo_task
import jax
import jax.numpy as jnp
import pytest

from thundersync_jax import train
from thundersync_jax.errors import ConfigError, StreamError
from thundersync_jax.metrics.writer import read
from thundersync_jax.models import base
from thundersync_jax.run import objective, placement
from thundersync_jax.run import tasks as run_tasks
from thundersync_jax.run.feed import compile_all
from thundersync_jax.run.run import Run
from thundersync_jax.types import TrajectoryKey

pytestmark = pytest.mark.usefixtures("quick_programs")


def changed(**fields):
    """A factory whose task set differs from echo_task's."""
    return lambda env, seed: dataclasses.replace(echo_task.tasks(), **fields)


@pytest.mark.parametrize(
    ("settings", "factory", "said"),
    [
        (
            {},
            lambda env, seed: None,
            "returned NoneType; expected an envs.base.TaskSet",
        ),
        ({}, lambda env, seed: {"train": []}, "returned dict"),
        ({}, changed(demonstrate=None), "no `demonstrate`"),
        ({"warm_start.check_questions": 33}, None, "check_questions is 33 and 32 held"),
        ({"evaluation.questions": 33}, None, "evaluation.questions is 33 and 32 held"),
        ({}, changed(train=[]), "no train tasks"),
        ({"group_sum_bytes": 1000}, None, "group_sum_bytes is 1,000 .* one open group"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(tmp_path, settings, factory, said):
    config = echo_task.small(**{"release": "trajectory"} | settings)
    with pytest.raises(ConfigError, match=said) as error:
        Run(config, tmp_path, factory or echo_task.make, lambda line: None)
    assert "\n" not in str(error.value)


def test_refused_tasks_leave_the_work_directory_free(tmp_path):
    config = echo_task.small(warm_start_steps=0, steps=1)
    with pytest.raises(ConfigError):
        train.train(config, tmp_path, environment=lambda env, seed: None)
    other = echo_task.replace(config, {"optim.learning_rate": 0.5})
    assert train.train(other, tmp_path, environment=echo_task.make)["steps"] == 1


def test_refused_memory_leaves_the_work_directory_free(tmp_path):
    config = echo_task.small(warm_start_steps=0, steps=1, release="trajectory")
    little = echo_task.replace(config, {"group_sum_bytes": 10})
    with pytest.raises(ConfigError, match="group_sum_bytes is 10"):
        train.train(little, tmp_path, environment=echo_task.make)
    assert not (tmp_path / "config.json").exists()
    with Run(config, tmp_path, echo_task.make, lambda line: None, owner=True):
        assert (tmp_path / "config.json").exists()


def test_what_a_crash_has_left_is_reaped_at_the_next_start(tmp_path):
    """By the run that owns the folder, before it makes anything; awaited or not."""
    reaped = []

    async def awaited():
        await asyncio.sleep(0)
        reaped.append("awaited")

    config = echo_task.small(warm_start_steps=0, steps=1)
    for number, reap in enumerate([lambda: reaped.append("called"), awaited]):
        found = dataclasses.replace(echo_task.tasks(), reap=reap)
        quiet = lambda line: None  # noqa: E731
        for owner in (False, True):
            with Run(config, tmp_path, lambda env, seed: found, quiet, owner=owner):  # noqa: B023
                assert len(reaped) == number + owner
    assert reaped == ["called", "awaited"]


@pytest.mark.parametrize("owner", [True, False])
def test_a_resume_and_an_evaluation_show_the_day_of_the_first_start(
    tmp_path, monkeypatch, owner
):
    """Another day would be other prompts (oobabooga/textgen#6692)."""
    days, prepared = [], run_tasks.prepared

    def noted(*arguments):
        days.append(arguments[-1])
        return prepared(*arguments)

    monkeypatch.setattr(run_tasks, "prepared", noted)
    config = echo_task.small(warm_start_steps=0, steps=1)
    with Run(config, tmp_path, echo_task.make, lambda line: None, owner=True):
        saved = json.loads((tmp_path / "day.json").read_text())["first_start"]
    assert saved == days[0].isoformat(timespec="seconds")
    earlier = "2026-05-01T12:00:00"
    (tmp_path / "day.json").write_text(json.dumps({"first_start": earlier}))
    with Run(config, tmp_path, echo_task.make, lambda line: None, owner=owner):
        assert days[1].isoformat() == earlier


def test_too_few_devices_of_a_jax_that_runs_already_are_named(monkeypatch):
    config = echo_task.small(warm_start_steps=0, steps=1)
    (first, *_) = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: [first])
    told = "runs already, with 1 CPU devices, .* needs 2; .*JAX_NUM_CPU_DEVICES=2"
    with pytest.raises(ConfigError, match=told):
        placement.place(config)


def test_demonstrations_need_an_action(tmp_path):
    factory = changed(demonstrate=lambda word: [])
    with pytest.raises(ConfigError, match="of 184 training tasks have no action"):
        Run(echo_task.small(), tmp_path, factory, lambda line: None)


# One plain sum of these takes 1 MiB, an exact one three, and a byte per row.
PARAMS = {"w": jnp.zeros((256, 1024))}
GROUPS = "up to 4 open groups of"
WORDS = "; at most three 32-bit words per parameter and sum"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"release": "batch"}, ""),
        (
            {},
            f"9.0 MiB of gradient sums per device: the batch and {GROUPS} 2 sums each",
        ),
        ({"loss.kl_coef": 0.1}, f"13.0 MiB .* the batch and {GROUPS} 3 sums each"),
        ({"loss.kl_coef": 0.1, "partial_groups": "keep"}, "9.0 MiB .* 2 sums each"),
        (
            {"accumulator": "exact"},
            f"30.0 MiB .* the batch, {GROUPS} 2 sums each and one for complete "
            f"groups{WORDS}",
        ),
        (
            {"accumulator": "exact", "release": "batch"},
            f"6.0 MiB .* the batch and one for complete groups{WORDS}",
        ),
        (
            {"loss.advantage": "batch_mean_std"},
            "3.0 MiB .* the batch and 2 that all groups share",
        ),
        (
            {"loss.advantage": "tracked_baseline"},
            f"5.0 MiB .* the batch and {GROUPS} 1 sum each",
        ),
        ({"loss.advantage": "tracked_baseline", "partial_groups": "keep"}, ""),
        (
            {"open_groups": None, "group_sum_bytes": 5 * 2**20},
            "5.0 MiB .* up to 2 open .*",
        ),
    ],
)
def test_start_up_line_says_what_the_sums_take(settings, said):
    settings = {"release": "trajectory", "partial_groups": "drop"} | settings
    config = echo_task.small(**settings)
    estimator, additive = objective.estimator(config.loss), config.loss.has_additive
    found = placement.plan(
        config, base.build(config.model), estimator, PARAMS, additive
    )
    assert re.fullmatch(said, found.description)


def test_exact_sums_of_one_group_that_do_not_fit_are_refused():
    config = echo_task.small(accumulator="exact", group_sum_bytes=5 * 2**20)
    with pytest.raises(ConfigError, match="group_sum_bytes .* take 6,291,968 bytes"):
        model, estimator = base.build(config.model), objective.estimator(config.loss)
        placement.plan(config, model, estimator, PARAMS, False)


def test_tasks_of_further_groups_follow_from_seed_step_and_number(tmp_path):
    config = echo_task.small(
        **{"uniform_groups": "replace", "rollout.replacement_groups": 9}
    )

    def few(env, seed):
        return echo_task.tasks(train=7)

    def ask(run, steps):
        return {
            (step, group): run.task(step, group)
            for step in steps
            for group in range(4 + 9)
        }

    with Run(config, tmp_path, few, lambda line: None) as run:
        found = ask(run, (1, 2, 3))
        for step in (1, 2, 3):
            own = [job.task for job in run.train_jobs(step)]
            assert own == [found[step, group] for group in range(4) for _ in range(4)]
            # Those that are left, over and over.
            left = len(set(run.tasks.train) - set(own))
            further = [found[step, group] for group in range(4, 13)]
            assert further == (9 * further[:left])[:9]
            assert set(further).isdisjoint(own) and len(set(further)) == left
            jobs = run.replacement_jobs(step, 5)
            assert [job.key for job in jobs] == [
                TrajectoryKey(step, 5, member) for member in range(4)
            ]
            assert {job.task for job in jobs} == {found[step, 5]}
        assert len({tuple(found[step, g] for g in (4, 5, 6)) for step in (1, 2, 3)}) > 1
        assert ask(run, (2, 1)).items() <= found.items()


def test_reference_of_the_kl_is_asked_for_and_copied(tmp_path):
    config = echo_task.small(**{"loss.kl_coef": 0.1})
    said = []
    with Run(config, tmp_path, echo_task.make, said.append) as run:
        params = run.initial_params()
        with pytest.raises(ValueError, match=r"loss\.kl_coef is 0\.1 .* set_reference"):
            run.new_stream(params, 0)
        run.set_reference(params)
        jax.tree.map(lambda x: x.delete(), params)  # as an update does, which donates
        compile_all(run, run.initial_params(), 0)
    assert any("copy of the parameters" in line for line in said)


class Fragile(echo_task.Echo):
    """Does not start on words with an a in front, and scores beyond all bounds."""

    async def start(self, task):
        if task.startswith("a"):
            raise ConnectionError("no sandbox")
        return await super().start(task)

    async def verify(self):
        return 1e31 if self.word.startswith("b") else await super().verify()


def test_members_without_tokens_do_not_end_a_run(tmp_path):
    """Neither in a step nor in the closing comparison, which has none to replay."""
    config = echo_task.small(
        **{
            "steps": 2,
            "partial_groups": "keep",
            "rollout.groups_per_step": 8,
            "rollout.failed_share_limit": 1.0,
        }
    )
    sunk = []
    result = train.train(
        config,
        tmp_path,
        environment=lambda env, seed: echo_task.tasks(Fragile),
        sinks=[lambda step, scalars: sunk.append((step, scalars))],
    )
    rows = read(tmp_path)
    assert result["steps"] == 2
    assert sum(row.get("failed_members", 0) for row in rows) > 0
    assert sum(row.get("invalid_rewards", 0) for row in rows) > 0
    assert [step for step, _ in sunk] == [0, 1, 2]
    assert sunk[1][1]["gradient_norm"] == rows[1]["gradient_norm"]


class Quitter(echo_task.Echo):
    async def verify(self):
        raise SystemExit(0)


def test_an_environment_cannot_end_the_process_as_if_all_were_well(tmp_path):
    config = echo_task.small(warm_start_steps=0, steps=1)
    with pytest.raises(StreamError, match="16 of 16 .* raised SystemExit: 0"):
        train.train(
            config, tmp_path, environment=lambda env, seed: echo_task.tasks(Quitter)
        )


def test_tasks_that_do_not_fit_are_told_from_tasks_that_are_missing(tmp_path):
    config = echo_task.small(warm_start_steps=0)
    long = changed(prompt=lambda word: 100 * word, demonstrate=None)
    with pytest.raises(ConfigError, match=r"no train task fits: .* takes 302 tokens"):
        Run(config, tmp_path, long, lambda line: None)
