"""Trajectories of several samples: recorded, rolled out, trained, and shown."""

import dataclasses
import io
import re

import echo_task
import jax
import numpy as np
import pytest
import sample_trees
from rollout_fakes import (
    ANSWER,
    CALL,
    FakeEngine,
    FakeEnvironment,
    FakeTeacher,
    key,
    of_kind,
    open_pool,
    outcomes,
    roll,
    teacher_logprobs,
)
from test_agent import play

from thundersync_jax import evaluate, show, train, verify
from thundersync_jax.chat import byte_level
from thundersync_jax.config import Config, LossConfig, RolloutConfig
from thundersync_jax.config.settings import replace
from thundersync_jax.engines.base import Scored
from thundersync_jax.envs.base import Observation
from thundersync_jax.errors import ConfigError
from thundersync_jax.flags import load_config
from thundersync_jax.metrics import records
from thundersync_jax.metrics.writer import read
from thundersync_jax.rollout.events import Completed, Turn
from thundersync_jax.rollout.recorder import Recorder
from thundersync_jax.run import policy_term, samples
from thundersync_jax.types import Call, Message, StopReason, Trajectory
from thundersync_jax.view.display import Display

COMPACTION = "configs/compaction.py"


@pytest.mark.usefixtures("quick_programs")
def test_streamed_is_the_batch_is_each_token_once():
    """Plain and exact, of rewards, turn credit, a teacher and both, whatever the
    tree of samples, own prompts and shared ones."""
    sample_trees.SEEN.clear()
    for seed in range(150):
        sample_trees.check(seed)
    seen = sample_trees.SEEN
    assert min(seen[kind] for kind in sample_trees.KINDS) > 20
    assert min(seen[move] for move in sample_trees.MOVES) > 250
    assert min(seen["shared prompt"], seen["own prompts"]) > 30
    assert seen["streamed"] > 250


def recorded(*, most=None):
    """Prompt 1 2, sampled 50 51, observed 9, sampled 52."""
    recorder = Recorder(key(), [1, 2], 0, samples=most)
    recorder.action([50, 51], [-1.0, -2.0], 0)
    recorder.context([1, 2, 50, 51, 9])
    recorder.action([52], [-3.0], 0)
    return recorder


def of(trajectory):
    """Every sample as ids, and which of them are trained."""
    return [
        (
            trajectory.ids[a:b].tolist(),
            np.flatnonzero(trajectory.loss_mask[a:b]).tolist(),
        )
        for a, b in trajectory.samples
    ]


FIRST = ([1, 2, 50, 51, 9, 52], [2, 3, 5])


@pytest.mark.parametrize(
    "context, known, expected",
    [
        ([1, 2, 50, 51, 9, 52, 8], 6, [([*FIRST[0], 8, 60], [2, 3, 5, 7])]),
        ([1, 2, 50, 51, 9, 52], 6, [([*FIRST[0], 60], [2, 3, 5, 6])]),
        ([1, 2, 7], 0, [FIRST, ([1, 2, 7, 60], [3])]),
        ([1, 2], 0, [FIRST, ([1, 2, 60], [2])]),
        ([1, 2, 50, 51], 0, [FIRST, ([1, 2, 50, 51, 60], [4])]),
        ([1, 2, 50, 51, 9], 0, [FIRST, ([1, 2, 50, 51, 9, 60], [5])]),
        ([5], 0, [FIRST, ([5, 60], [1])]),
    ],
    ids=["goes on", "at once", "summary", "again", "branch", "again later", "anew"],
)
def test_a_history_that_does_not_go_on_is_another_sample(context, known, expected):
    recorder = recorded()
    assert recorder.context(context) == known
    recorder.action([60], [-4.0], 0)
    trajectory = recorder.trajectory(StopReason.FINISHED)
    assert of(trajectory) == expected
    assert trajectory.action_tokens == 4 and trajectory.turns == 3
    assert recorder.length == len(expected[-1][0])
    sampled = trajectory.logprobs[trajectory.loss_mask]
    assert sampled.tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_who_returns_to_an_earlier_history_goes_on_with_its_sample():
    """As a sub-agent ends; the longest of two that both are continued is meant."""
    recorder = recorded()
    recorder.context([7])
    recorder.action([61], [-1.0], 0)
    recorder.credit(2.0, 0.5)
    recorder.context([7, 61, 8, 8])  # of the sub-agent
    assert recorder.sample == 1
    recorder.context([*FIRST[0], 3])  # and back
    assert recorder.sample == 0 and recorder.length == 7
    recorder.action([62], [-1.0], 0)
    recorder.credit(1.0, -0.25)
    trajectory = recorder.trajectory(StopReason.FINISHED)
    assert of(trajectory) == [
        ([*FIRST[0], 3, 62], [2, 3, 5, 7]),
        ([7, 61, 8, 8], [1]),
    ]
    credits = dict(zip(trajectory.ids, trajectory.turn_credits, strict=True))
    assert credits[61] == 0.5 and credits[62] == -0.25 and credits[52] == 0
    recorder.context([1])  # which both that begins with it and the prompt continue
    assert recorder.sample == 2
    recorder.context([1, 2])
    recorder.context([1, 2, 3])
    assert recorder.sample == 2 and recorder.length == 3


def test_no_more_samples_than_allowed():
    recorder = recorded(most=2)
    recorder.context([3])
    match = r"first 2 of the 6 recorded ones.*more samples than rollout\.samples 2"
    with pytest.raises(ValueError, match=match):
        recorder.context([1, 2, 4])
    assert of(recorder.trajectory(None)) == [FIRST, ([3], [])]


def test_scores_of_a_teacher_stand_in_their_sample():
    recorder = recorded()
    recorder.context([7, 7])
    recorder.action([60, 61], [-1.0, -1.0], 0)
    early = recorder.trajectory(None)
    recorder.score(np.array([2, 3]), Scored(np.array([[-5.0], [-6.0]]), None), 1)
    recorder.score(np.array([5]), Scored(np.array([[-7.0]]), None), 0)
    recorder.context([*FIRST[0], 8])
    scores = recorder.teacher_scores(early)
    assert scores.logprobs[:, 0].tolist() == [0, 0, 0, 0, 0, -7, 0, 0, -5, -6]
    later = recorder.trajectory(StopReason.FINISHED)
    assert later.teacher.logprobs[:, 0].tolist() == [0] * 5 + [-7, 0, 0, 0, -5, -6]
    assert later.unscored_tokens == 2
    with pytest.raises(ValueError, match="2 entries a position after 1"):
        recorder.score(np.array([2]), Scored(np.zeros((1, 2)), None), 0)


def rewritten():
    """Prompt of 2 and an action of 3, a context of 1 and an action of 1."""
    recorder = Recorder(key(), [1, 2], 0, samples=2)
    recorder.action([50, 51, 52], [-1.0] * 3, 0)
    recorder.context([3])
    recorder.action([53], [-1.0], 0)
    return recorder.trajectory(StopReason.FINISHED)


@pytest.mark.parametrize("starts", [(), (1,), (0, 0), (0, 4, 3), (0, 7), (0, 8)])
def test_samples_begin_at_ascending_places(starts):
    with pytest.raises(ValueError, match=r"samples start at .* of 7 ids; expected 0"):
        dataclasses.replace(rewritten(), starts=starts)


@pytest.mark.parametrize(
    "loss, weights",
    [
        (LossConfig(), [0.25, 0.25]),
        (LossConfig(aggregation="token_mean"), [1, 1]),
        (LossConfig(aggregation="constant", constant=8.0), [0.125, 0.125]),
        (LossConfig(truncated="mask"), [0.25, 0.25]),
    ],
)
def test_weights_are_those_of_all_tokens_of_a_member(loss, weights):
    one = rewritten()
    first, second = (samples.sample(one, loss, (8,), *span) for span in one.samples)
    assert first.tree["tokens"].tolist() == [1, 2, 50, 51, 52, 0, 0, 0]
    assert first.tree["weights"].tolist() == [0, 0, *[weights[0]] * 3, 0, 0, 0]
    assert second.tree["tokens"].tolist() == [3, 53] + [0] * 6
    assert second.tree["weights"].tolist() == [0, weights[1]] + [0] * 6
    counts = [samples.trained_tokens(one, loss, *span) for span in one.samples]
    assert counts == [3, 1]


def test_a_sample_that_trains_nothing_is_left_out():
    one = rewritten()
    nothing = dataclasses.replace(one, loss_mask=one.loss_mask & (one.ids != 53))
    assert samples.spans(one) == [(0, 5), (5, 7)]
    assert samples.spans(nothing) == [(0, 5)]
    none = dataclasses.replace(one, loss_mask=one.loss_mask & False)
    assert samples.spans(none) == [(0, 5)]


def test_a_shared_prompt_begins_every_sample_or_is_refused():
    config = Config(
        share_prompt="group", rollout=RolloutConfig(samples=2, segment_buckets=(96,))
    )
    one = rewritten()
    made = samples.Samples(config, 8, lambda step, group: np.array([1, 2]))
    behind = made.whole(one, 0, 5).tree
    assert int(behind["start"]) == 2 and int(behind["length"]) == 3
    match = "begins with another prompt.*a rewritten history begin with that.*=no"
    with pytest.raises(ConfigError, match=match):
        made.whole(one, 5, 7)
    # And the prompt of one that does begin with it is not in it, but 53 is.
    ids = np.array([1, 2, 50, 51, 52, 1, 2, 53])
    mask = ids >= 50
    again = Trajectory(
        key(), ids, mask, -1.0 * mask, 2, one.stop_reason, 0, starts=(0, 5)
    )
    behind = made.whole(again, 5, 8).tree
    assert (int(behind["start"]), int(behind["length"])) == (2, 1)
    assert behind["tokens"][0] == 53 and behind["weights"][0] == 0.25


class Compacting(FakeEnvironment):
    """Calls are answered by another history; `said` are its messages."""

    def __init__(self, said=("so far: 2",), **parts):
        super().__init__(**parts)
        self.said = [Message("user", text) for text in said]

    async def step(self, action):
        observation = await super().step(action)
        if action.kind != "call":
            return observation
        return Observation(messages=tuple(self.said), rewrite=True)


def twice_a_call(request, turn):
    """By the number of the turn, for every sample is a session of its own."""
    return CALL if request.seed[-1] < 2 else ANSWER


def test_an_environment_may_rewrite_the_history():
    trajectory, reward, engine = play(Compacting(), twice_a_call, samples=3)
    prompt = byte_level.render_prompt("2+5")
    other = byte_level.render_prompt("so far: 2")
    assert reward == 1.0 and trajectory.stop_reason is StopReason.FINISHED
    assert [trajectory.ids[a:b].tolist() for a, b in trajectory.samples] == [
        [*prompt, *CALL],
        [*other, *CALL],
        [*other, *ANSWER],
    ]
    assert trajectory.action_tokens == 2 * len(CALL) + len(ANSWER)
    # The engine has a session for each, of which none is left.
    assert [len(r.new_ids) for r in engine.requests] == [len(prompt), *2 * [len(other)]]
    assert len({r.session for r in engine.requests}) == 3
    assert engine.released == [r.session for r in engine.requests]


def test_a_history_that_goes_on_as_it_was_is_the_same_sample():
    """An environment may tell all of it every time."""

    class Telling(FakeEnvironment):
        async def step(self, action):
            await super().step(action)
            told = "2+5<assistant>" + "".join(x.raw or "1+1" for x in self.actions)
            return Observation(told, rewrite=True, done=action.kind == "answer")

    class Chat(byte_level.ByteLevel):
        """Text and ids are one."""

        def prompt(self, said):
            text = said if isinstance(said, str) else said[0].content
            calls = text.count("1+1")
            ids = byte_level.render_prompt(text.partition("<")[0])
            between = np.full(calls, 7, np.int32)
            return np.concatenate([ids, *[CALL] * calls, between])

    trajectory, _, engine = play(
        Telling(), lambda request, turn: CALL if turn < 1 else ANSWER, chat=Chat()
    )
    assert trajectory.starts == (0,)
    assert [len(request.new_ids) for request in engine.requests] == [5, 1]
    prompt = byte_level.render_prompt("2+5")
    assert trajectory.ids.tolist() == [*prompt, *CALL, 7, *ANSWER]


def test_a_context_of_its_own_has_the_whole_room():
    """Of 24 tokens, where one history of six turns would take 60."""
    lengths = {
        "context_tokens": 24,
        "prefill_buckets": (24,),
        "gradient_buckets": (24,),
    }
    engine = FakeEngine(lambda *_: CALL, context_tokens=24)
    trajectory, _, _ = play(
        Compacting(["1"]), engine=engine, turns=6, samples=6, **lengths
    )
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert len(trajectory.samples) == trajectory.turns == 6
    said = "x" * 22  # and two marks leave no room for a token
    engine = FakeEngine(lambda *_: CALL, context_tokens=24)
    trajectory, _, _ = play(Compacting([said]), engine=engine, samples=6, **lengths)
    assert trajectory.stop_reason is StopReason.CONTEXT_OVERFLOW
    assert len(trajectory.samples) == 1


def test_one_history_too_many_fails_the_member_alone():
    with open_pool(
        lambda member: Compacting() if member else FakeEnvironment(),
        FakeEngine(twice_a_call),
    ) as pool:
        ended = outcomes(roll(pool, 2))
    assert ended[1].stop_reason is StopReason.ENVIRONMENT_ERROR
    match = r"step\(\) of turn 0 rewrote the history: .* than rollout\.samples 1"
    assert re.search(match, ended[1].reason)
    assert ended[0].reward == 1.0


def test_of_several_calls_the_last_history_counts_and_what_follows_it():
    class Chat(byte_level.ByteLevel):
        """An answer is two calls, of which the second is malformed or not."""

        def parse(self, ids, stop_ids, whole=False):
            action = byte_level.parse_action(ids, stop_ids, whole)
            if action.kind != "call":
                return action
            calls = [Call(f"c{i}", "add", {}, str(i)) for i in range(3)]
            return dataclasses.replace(action, calls=tuple(calls))

    class Calls(FakeEnvironment):
        async def step(self, action):
            await super().step(action)
            rewrite = action.call_id == "c1"
            return Observation(f"says {action.call_id}", rewrite=rewrite)

    trajectory, _, _ = play(Calls(), lambda *_: CALL, chat=Chat(), turns=2, samples=2)
    assert byte_level.decode(trajectory.ids) == (
        "<user>2+5<assistant><call>1+1<end>"
        "<user>says c1\nsays c2<assistant><call>1+1<end>"
    )


def test_a_teacher_scores_every_sample_in_its_own_session():
    teacher = FakeTeacher()
    with open_pool(
        lambda member: Compacting(),
        FakeEngine(twice_a_call),
        make_teacher=lambda loop, on_error: teacher,
        samples=3,
    ) as pool:
        events = roll(pool, 1)
    (completed,) = of_kind(events, Completed)
    trajectory = completed.trajectory
    assert trajectory.unscored_tokens == 0
    for start, end in trajectory.samples:
        scores = teacher_logprobs(trajectory.ids[start:end])
        trained = trajectory.loss_mask[start:end]
        found = trajectory.teacher.logprobs[start:end]
        np.testing.assert_array_equal(found[trained], scores[trained])
    names = [session for session, _, _ in teacher.asked]
    assert len(set(names)) == 3 and teacher.released == names
    assert [turn.sample for turn in of_kind(events, Turn)] == [0, 1, 2]
    assert [turn.start for turn in of_kind(events, Turn)] == list(trajectory.starts)


def test_records_and_show_have_every_sample(tmp_path, capsys):
    trajectory, _, _ = play(Compacting(), twice_a_call, samples=3)
    one = dataclasses.replace(trajectory, reward=0.5)
    path = records.write_rollouts(tmp_path, 5, [one], {(1, 2): 0.25})
    (record,) = records.read_rollouts(path)
    assert record.trajectory.starts == one.starts
    assert byte_level.decode(record.prompt_ids) == "<user>2+5<assistant>"
    result = show.show(tmp_path, group=1, member=2)["trajectory"]
    assert result["samples"] == 3 and result["trained_tokens"] == one.action_tokens
    shown = capsys.readouterr().out.splitlines()[1:]
    assert shown[0].endswith("3 turns  39 tokens, 12 trained  3 samples")
    assert shown[1:] == [
        "  sample 1 of 3",
        "  observed  <user>2+5<assistant>",
        "  trained   <call>1+1<end>",
        "  sample 2 of 3",
        "  observed  <user>so far: 2<assistant>",
        "  trained   <call>1+1<end>",
        "  sample 3 of 3",
        "  observed  <user>so far: 2<assistant>",
        "  trained   7<end>",
    ]
    old = path.read_text().replace('"starts": [0, 10, 26], ', "")
    path.write_text(old)
    (record,) = records.read_rollouts(path)  # of a run from before there were several
    assert record.trajectory.starts == (0,)
    path.write_text(old.replace('"ids"', '"starts": [0, 1.5], "ids"'))
    with pytest.raises(ConfigError, match="is no trajectory"):
        records.read_rollouts(path)


def test_samples_without_an_observation_between_them_stand_apart():
    """Both begin with a trained token; text of one is not joined to the other's."""
    ids = np.array([65, 66, 67, 68])
    one = Trajectory(
        key(), ids, np.ones(4, bool), np.zeros(4), 2, StopReason.FINISHED, 0,
        starts=(0, 2),
    )  # fmt: skip
    stream = io.StringIO()
    Display(stream).sample(one)
    assert stream.getvalue().splitlines()[2:] == [
        "  sample 1 of 2",
        "  trained   AB",
        "  sample 2 of 2",
        "  trained   CD",
    ]


REFUSED = {
    "rollout.samples is 0": lambda: RolloutConfig(samples=0),
    "rollout.samples is 2 with release 'turn'": lambda: echo_task.small(
        **{
            "release": "turn",
            "loss.advantage": "none",
            "loss.distill": "sampled_reverse_kl",
            "teacher.workdir": "runs/teacher",
            "rollout.samples": 2,
        }
    ),
    "accumulator is 'exact' with 8192 samples per step": lambda: Config(
        accumulator="exact",
        rollout=RolloutConfig(groups_per_step=256, samples=4),
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_settings_that_several_samples_exclude(message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        REFUSED[message]()


def test_a_loss_that_needs_the_whole_trajectory_sees_one_sample_alone():
    term = policy_term.load(LossConfig(surrogate="own_losses:sequence_ratio"))
    term.check_samples(1)
    with pytest.raises(ConfigError, match=r"rollout\.samples is 2 with a loss\.surr"):
        term.check_samples(2)
    policy_term.load(LossConfig(surrogate="own_losses:cispo")).check_samples(2)


@pytest.mark.usefixtures("quick_programs")
def test_a_run_trains_each_token_in_the_context_it_was_sampled_in(
    tmp_path, monkeypatch, capsys
):
    """Some steps of the example: the learner's log-probabilities are the sampler's."""
    monkeypatch.syspath_prepend("configs")
    config = replace(
        load_config(COMPACTION),
        {
            "steps": 3,
            "warm_start.steps": 60,
            "warm_start.check_every_steps": 60,
            "evaluation.questions": 8,
            "rollout.groups_per_step": 4,
        },
    )
    train.train(replace(config, {"steps": 2}), tmp_path)
    train.train(config, tmp_path)  # which goes on with the first two steps
    rows = read(tmp_path)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert 2 < row["samples_mean"] <= 3 and row["gradient_norm"] > 0
        assert row["mismatch_max"] < 1e-3
        assert row["tokens"] == row["action_tokens_mean"] * row["kept_members"]
    _, found = records.read_step(tmp_path)
    assert {len(record.trajectory.starts) for record in found} >= {3}
    graded = evaluate.evaluate(config, tmp_path, questions=4, samples=2)
    assert graded["step"] == 3 and 3 < graded["turns_mean"] <= 5
    exact = replace(config, {"accumulator": "exact"})
    result = verify.verify(exact, steps=1, orders=1)
    assert result["identical"] and result["max_relative_difference"] < 1e-5
    assert jax.device_count() == 8
