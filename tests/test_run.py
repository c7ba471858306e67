"""What a run refuses before it begins, and what it survives."""

import dataclasses

import echo_task
import pytest

from thundersync_jax import train
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics import read
from thundersync_jax.run import Run
from thundersync_jax.warm_start import demonstrations


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with echo_task.kept_programs(tmp_path_factory.getbasetemp() / "programs"):
        yield


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


def test_demonstrations_need_an_action(tmp_path):
    factory = changed(demonstrate=lambda word: [])
    with (
        Run(echo_task.small(), tmp_path, factory, lambda line: None) as run,
        pytest.raises(ConfigError, match="has no action"),
    ):
        demonstrations(run)


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
    with pytest.raises(RuntimeError, match=r"called sys.exit\(0\)"):
        train.train(
            config, tmp_path, environment=lambda env, seed: echo_task.tasks(Quitter)
        )
