"""The made-up workload: as much work as asked for, and the same in every order."""

import asyncio
import itertools
from pathlib import Path

import numpy as np
import pytest

from thundersync_jax.chat import byte_level
from thundersync_jax.config import EnvConfig
from thundersync_jax.engines.base import Response
from thundersync_jax.envs import letters
from thundersync_jax.envs.base import Action, check_split
from thundersync_jax.envs.letters import LettersOptions
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import load_config
from thundersync_jax.rollout.agent import Agent
from thundersync_jax.rollout.commands import Commands
from thundersync_jax.types import StopReason, TrajectoryKey

CONFIGS = Path(__file__).parents[1] / "configs"
STRAGGLERS = CONFIGS / "bench_stragglers.py"
BUSY = LettersOptions(calls=(1, 4), observation_tokens=(2, 9), train_tasks=40)


def _make(options=BUSY, seed=0):
    return letters.make(EnvConfig(options=options), seed)


def _actions(seed: int) -> list[Action]:
    """More than are ever asked for, of every kind and of ids beyond the bytes."""
    rng = np.random.default_rng(seed)
    kinds = itertools.cycle(["malformed", "answer", "call"])
    drawn = (rng.integers(0, 512, rng.integers(1, 20)).tolist() for _ in range(8))
    return [Action(next(kinds), "", tuple(ids)) for ids in drawn]


async def _play(environment, actions):
    """Plays until done; returns the observations' texts and the reward."""
    await environment.start("a prompt")
    texts = []
    for action in actions:
        observation = await environment.step(action)
        if observation.done:
            return texts, await environment.verify()
        texts.append(observation.text)
    raise AssertionError("never done")


def _attempts(count: int, tasks=None):
    tasks = tasks or _make()
    plays = (_play(tasks.environment(), _actions(i)) for i in range(count))
    return [asyncio.run(play) for play in plays]


def test_rendered_lengths_and_calls_are_those_asked_for():
    tasks = _make()
    for text in [*tasks.train, *tasks.heldout]:
        assert len(byte_level.render_prompt(tasks.prompt(text))) == BUSY.prompt_tokens
    attempts = _attempts(200)
    lengths = [
        len(byte_level.render_observation(x)) for texts, _ in attempts for x in texts
    ]
    assert {len(texts) for texts, _ in attempts} == {1, 2, 3, 4}
    assert set(lengths) == set(range(2, 10))
    # Calls and the first length are drawn apart, not one from the other.
    firsts = {(len(texts), len(texts[0]) + 2) for texts, _ in attempts}
    assert len(firsts) > 24
    assert [texts for texts, _ in _attempts(3, _make(LettersOptions()))] == [[]] * 3


def test_work_follows_from_the_sampled_ids_alone():
    """Neither the task set's seed, nor the order, nor attempts beside it matter."""
    alone = _attempts(20)

    async def together():
        tasks = _make(seed=5)
        plays = [_play(tasks.environment(), _actions(i)) for i in reversed(range(20))]
        return await asyncio.gather(*plays)

    assert asyncio.run(together())[::-1] == alone
    assert len({tuple(texts) for texts, _ in alone}) == 20


def test_observations_follow_from_all_actions_so_far():
    options = LettersOptions(calls=(3, 3), observation_tokens=(9, 9))
    environments = [_make(options).environment() for _ in range(2)]
    first, other, last = (Action("answer", "", ids) for ids in [(1, 2), (1, 3), (4,)])
    one = asyncio.run(_play(environments[0], [first, last, last, last]))[0]
    two = asyncio.run(_play(environments[1], [other, last, last, last]))[0]
    assert not set(one) & set(two)
    assert len(set(one)) == 3


def test_work_is_a_pinned_function_of_the_ids():
    """Written out: the same in every process and every version of Python."""
    environment = _make().environment()
    actions = [Action("call", "", (i, 300 + i)) for i in range(1, 6)]
    texts, _ = asyncio.run(_play(environment, actions))
    assert texts == ["cz", "ax", "d"]


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([b"abcz"], 1.0),
        ([b"abAB"], 0.5),
        ([b"`{a\xff"], 0.25),  # the neighbours of a and z
        ([b"a", b"bcd "], 0.8),  # over the trajectory, not the turn
        ([[97, 300, 511, 261, 1]], 0.5),  # only bytes are read, byte 1 among them
        ([[300, 511]], 0.0),
        ([[]], 0.0),
    ],
)
def test_reward_is_the_share_of_lower_case_letters_among_sampled_bytes(turns, reward):
    options = LettersOptions(calls=(len(turns) - 1,) * 2)
    # The text, which may hold marks and replacements, is not what is scored.
    actions = [Action("answer", "zzzzzz", tuple(ids)) for ids in turns]
    environment = _make(options).environment()
    assert asyncio.run(_play(environment, actions))[1] == reward


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        ([b"ABCz"], 1.0),
        ([b"`{A", b"a"], 1.0),  # in any turn
        ([b"`{AB\xff"], 0.0),
        ([[300, 511]], 0.0),
        ([[]], 0.0),
    ],
)
def test_a_verdict_of_any_asks_whether_there_is_a_letter(turns, reward):
    options = LettersOptions(calls=(len(turns) - 1,) * 2, verdict="any")
    actions = [Action("answer", "zzzzzz", tuple(ids)) for ids in turns]
    environment = _make(options).environment()
    assert asyncio.run(_play(environment, actions))[1] == reward


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_no_heldout_prompt_occurs_in_training(seed, monkeypatch):
    monkeypatch.setattr(letters, "_ALPHABET", "ab")  # 64 prompts: all must be used
    options = LettersOptions(prompt_tokens=8, train_tasks=48, heldout_tasks=16)
    tasks = _make(options, seed)
    assert len({*tasks.train, *tasks.heldout}) == 64
    check_split(tasks)


def test_training_depends_on_the_seed_and_heldout_does_not():
    one, again, other = _make(seed=1), _make(seed=1), _make(seed=2)
    assert one.train == again.train
    assert not set(one.train) & set(other.train)
    assert one.heldout == other.heldout
    assert one.demonstrate is None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prompt_tokens": 7}, "prompt_tokens is 7, expected at least 8"),
        ({"train_tasks": 0}, "train_tasks is 0"),
        ({"heldout_tasks": 0}, "heldout_tasks is 0"),
        ({"calls": (-1, 0)}, "calls"),
        ({"calls": (2, 1)}, "calls"),
        ({"calls": 2}, "calls"),
        ({"observation_tokens": (1, 4)}, "observation_tokens.*at least 2"),
        ({"observation_tokens": (4,)}, "observation_tokens"),
        ({"verdict": "all"}, "verdict"),
    ],
)
def test_impossible_options_are_refused_in_one_line(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        LettersOptions(**values)
    assert "\n" not in str(caught.value)


class RandomSampler:
    """Any id of 512, as untrained weights would; stops and limits as an engine does."""

    async def sample(self, request):
        rng = np.random.default_rng(request.seed)
        ids = rng.integers(0, 512, request.max_new_tokens)
        stops = np.flatnonzero(np.isin(ids, request.stop_ids))
        ids = ids[: stops[0] + 1] if len(stops) else ids
        logprobs = np.zeros(len(ids), np.float32)
        return Response(request.session, ids, logprobs, len(stops) > 0, 0)

    def release(self, session):
        pass


async def _attempt(config, tasks, group, member):
    """Returns the sampled tokens and the reward."""
    agent = Agent(
        key=TrajectoryKey(1, group, member),
        task=tasks.train[group],
        make_environment=lambda _: tasks.environment(),
        sampler=RandomSampler(),
        commands=Commands(),
        limits=config.rollout,
        seed=config.seed,
        policy_version=0,
    )
    trajectory = await agent.act()
    assert trajectory.stop_reason is StopReason.FINISHED
    return trajectory.action_tokens, (await agent.verify()).reward


def test_bench_config_gives_both_verdicts_in_every_group():
    """Two rewards are as many as exact sums may stream; a uniform group has none."""
    config = load_config(str(CONFIGS / "bench_cpu.py"))
    limits, tasks = config.rollout, letters.make(config.env, config.seed)
    for group in range(limits.groups_per_step):
        members = range(limits.group_size)
        played = [asyncio.run(_attempt(config, tasks, group, m)) for m in members]
        rewards = [reward for _, reward in played]
        assert set(rewards) == {0.0, 1.0}
        assert 2 <= sum(rewards) <= limits.group_size - 2


@pytest.mark.parametrize("variant", ["groups4", "group32"])
def test_stragglers_config_gives_unequal_rewards_to_finished_trajectories(variant):
    config = load_config(f"{STRAGGLERS}:{variant}")
    limits, tasks = config.rollout, letters.make(config.env, config.seed)
    assert limits.groups_per_step * limits.group_size == limits.slots == 32
    assert config.open_groups == limits.groups_per_step
    assert config.evaluation.questions <= len(tasks.heldout)

    for group in range(limits.groups_per_step):
        members = range(limits.group_size)
        played = [asyncio.run(_attempt(config, tasks, group, m)) for m in members]
        assert len({reward for _, reward in played}) > limits.group_size / 2
        assert max(tokens for tokens, _ in played) <= limits.turn_tokens


def test_stragglers_config_names_its_variants():
    with pytest.raises(ValueError, match=r"'group4', expected 'groups4' or 'group32'"):
        load_config(f"{STRAGGLERS}:group4")
    assert load_config(str(STRAGGLERS)) == load_config(f"{STRAGGLERS}:groups4")
