"""What a run that was stopped and started again has in common with a whole one."""

import signal
import threading
import time

import echo_task
import jax
import numpy as np
import pytest

from thundersync_jax import train
from thundersync_jax.chat import byte_level
from thundersync_jax.config import OptimConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.metrics.records import read_rollouts, rollouts_path
from thundersync_jax.metrics.writer import read
from thundersync_jax.run import placement, run, state, tasks
from thundersync_jax.run.checkpoint import Checkpoints, sha256

STEPS, GROUPS, SIZE, TASKS = 10, 3, 4, 8
SAVED_EVERY, EVALUATED_EVERY = 3, 5
STOPPED_IN, STOPPED_AFTER = 5, 5  # a step, and how many of its verdicts

CONFIG = echo_task.small(
    **{
        "steps": STEPS,
        "rollout.groups_per_step": GROUPS,
        "rollout.group_size": SIZE,
        "rollout.failed_share_limit": 1.0,
        "evaluation.every_steps": EVALUATED_EVERY,
        "checkpoint.every_steps": SAVED_EVERY,
        "checkpoint.keep": STEPS,
    }
)
WORDS = echo_task.tasks().train[:TASKS]
ORDER = tasks.take(WORDS, CONFIG.seed, 0, STEPS * GROUPS)


class Breaking(echo_task.Echo):
    """One of the tasks never starts: its group is dropped in every epoch."""

    async def start(self, task):
        if task == ORDER[4]:
            raise ConnectionError("a broken task")
        return await super().start(task)


def breaking(env, seed):
    return echo_task.tasks(Breaking, TASKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder):
    """A run that nobody stopped."""
    workdir = folder / "whole"
    return workdir, train.train(CONFIG, workdir, environment=breaking)


@pytest.fixture(scope="module")
def resumed(folder):
    """A run stopped by Ctrl-C in the middle of a step, and started again."""
    workdir = folder / "resumed"
    verdicts = []

    class Stopping(Breaking):
        async def verify(self):
            if len(read(workdir)) == STOPPED_IN:  # rows 0 to STOPPED_IN - 1
                verdicts.append(time.monotonic())
            if len(verdicts) == STOPPED_AFTER:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return await super().verify()

    before = echo_task.threads()
    with pytest.raises(KeyboardInterrupt):
        train.train(
            CONFIG, workdir, environment=lambda *_: echo_task.tasks(Stopping, TASKS)
        )
    assert time.monotonic() - verdicts[STOPPED_AFTER - 1] < 5.0
    assert echo_task.threads() <= before
    assert [row["step"] for row in read(workdir)] == list(range(STOPPED_IN))
    assert saved(workdir) == [SAVED_EVERY]
    return workdir, train.train(CONFIG, workdir, environment=breaking)


def saved(workdir):
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        return checkpoints.steps()


def recorded(workdir, step):
    return read_rollouts(rollouts_path(workdir, step))


def test_stopped_run_ends_with_the_bits_of_a_whole_one(whole, resumed):
    """Sums of the step that was cut were lost, or counted twice."""
    assert resumed[1]["sha256"] == whole[1]["sha256"]
    assert resumed[1]["heldout_success"] == whole[1]["heldout_success"]


def test_sampled_tokens_go_on_as_if_nothing_had_happened(whole, resumed):
    """Random state was missing from the checkpoint (AI-Hypercomputer/maxtext#4343)."""
    for step in range(1, STEPS + 1):
        for one, other in zip(
            recorded(whole[0], step), recorded(resumed[0], step), strict=True
        ):
            assert one.trajectory.key == other.trajectory.key
            assert one.advantage == other.advantage
            np.testing.assert_array_equal(one.trajectory.ids, other.trajectory.ids)
            np.testing.assert_array_equal(
                one.trajectory.logprobs, other.trajectory.logprobs
            )


def test_every_step_takes_the_next_tasks_in_order(whole, resumed):
    """Resume began the data again (PrimeIntellect-ai/prime-rl#3164) or in another order
    (google/tunix#2288), or a group dropped for good held its position back
    (huggingface/trl#7274)."""
    for workdir, _ in (whole, resumed):
        dropped = 0
        for step in range(1, STEPS + 1):
            words = {}
            for record in recorded(workdir, step):
                prompt = byte_level.decode(record.prompt_ids[1:-1])
                words[record.trajectory.key.group] = prompt
            expected = ORDER[(step - 1) * GROUPS :][:GROUPS]
            dropped += expected.count(ORDER[4])
            assert words == {
                group: word for group, word in enumerate(expected) if word != ORDER[4]
            }
        assert dropped == sum(row.get("dropped_groups", 0) for row in read(workdir)) > 2


def test_saving_and_evaluating_need_no_common_period(whole, resumed):
    """Saving looked for a metric of a step without one (NVIDIA-NeMo/RL#1229)."""
    for workdir, _ in (whole, resumed):
        assert saved(workdir) == [3, 6, 9, 10]
        evaluated = [row["step"] for row in read(workdir) if "heldout_success" in row]
        assert evaluated == [0, 5, 10]


def test_steps_and_updates_are_counted_once(whole, resumed):
    """The saved number meant the step done and the step to do
    (AI-Hypercomputer/maxdiffusion#484)."""
    for workdir, result in (whole, resumed):
        rows = read(workdir)
        assert [row["step"] for row in rows] == list(range(STEPS + 1))
        updates = 0
        for row in rows[1:]:
            assert row["policy_version"] == updates
            updates += row["gradient_norm"] > 0
        assert result["steps"] == STEPS
        assert updates == result["updates"] > STEPS // 2
        now, facts = restored(workdir)
        counts = [x for x in jax.tree.leaves(now.opt_state) if x.dtype == np.int32]
        assert {int(count) for count in counts} == {updates}
        assert facts["version"] == updates
        assert sha256(now) == result["sha256"]


def restored(workdir):
    with run.Run(CONFIG, workdir, breaking) as built:
        like = state.init(built.optimizer, built.initial_params())
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            return checkpoints.restore(STEPS, like)


def test_numbers_of_a_resumed_run_are_those_of_a_whole_one(whole, resumed):
    timed = ("_secs", "learner_busy_share", "contention", "compiles")
    for one, other in zip(read(whole[0]), read(resumed[0]), strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name] == other[name] or name.endswith(timed), (one, other)


def test_finished_run_only_says_its_result_again(whole, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("built again")

    monkeypatch.setattr(train, "Run", refuse)
    assert train.train(CONFIG, whole[0], environment=breaking) == whole[1]


def test_another_config_is_refused_where_a_run_was(whole, monkeypatch):
    changed = echo_task.replace(CONFIG, {"optim.learning_rate": 0.5})
    with pytest.raises(ConfigError, match=r"optim\.learning_rate"):
        train.train(changed, whole[0], environment=breaking)


def test_masters_are_float32_whatever_the_activations(tmp_path):
    """float32 masters were rebuilt from bfloat16 ones (TensorAuto/OpenTau#185)."""
    config = echo_task.replace(CONFIG, {"model.dtype": "bfloat16"})
    with run.Run(config, tmp_path, breaking) as built:
        params = jax.tree.map(lambda x: x * 0 + 1.001, built.initial_params())
        with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(1, state.init(built.optimizer, params), {})
        step, found = placement.policy(tmp_path, built.initial_params())
    assert step == 1
    for x in jax.tree.leaves(found):
        np.testing.assert_array_equal(np.asarray(x), np.float32(1.001))


def test_warm_start_goes_on_where_it_was(folder, whole):
    """Stopped in its second measurement, later in the evaluation that follows it."""
    workdir = folder / "warm"
    asked = []

    class Stopping(Breaking):
        async def verify(self):
            asked.append(self.word)
            if len(asked) in stops:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            return await super().verify()

    def warm_steps():
        with Checkpoints(workdir / "warm_start") as checkpoints:
            return checkpoints.steps()

    def stopping(env, seed):
        return echo_task.tasks(Stopping, TASKS)

    config = echo_task.replace(
        CONFIG, {"warm_start.check_every_steps": CONFIG.warm_start.steps // 2}
    )
    questions = config.warm_start.check_questions
    half, all_steps = config.warm_start.steps // 2, config.warm_start.steps
    stops = {questions + 1}
    with pytest.raises(KeyboardInterrupt):
        train.train(config, workdir, environment=stopping)
    assert warm_steps() == [half]
    # The measurement that was cut is made again, then the evaluation begins.
    stops = {len(asked) + questions + 1}
    with pytest.raises(KeyboardInterrupt):
        train.train(config, workdir, environment=stopping)
    assert warm_steps() == [half, all_steps]
    assert not read(workdir)
    with run.Run(CONFIG, workdir, breaking) as built:
        optimizer = state.make_optimizer(OptimConfig(1.0, warmup_steps=1))
        like = state.init(optimizer, built.initial_params())
        hashes = []
        for folder in (workdir, whole[0]):
            with Checkpoints(folder / "warm_start") as checkpoints:
                saved_state, facts = checkpoints.restore(all_steps, like)
            assert facts["done"]
            hashes.append(sha256(saved_state))
    assert hashes[0] == hashes[1]
