"""What turns and shared prompts refuse, in one line; a refusal loses nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_segments as toy

from thundersync_jax import GradientStream, Surrogate, advantages
from thundersync_jax.errors import StreamError
from thundersync_jax.stream.segments import Segments, State
from thundersync_jax.stream.turn_stream import TurnStream

pytestmark = pytest.mark.usefixtures("quick_programs")
EXACT = 1e-10  # rounding of float64 sums of some dozen terms


@pytest.fixture(scope="module", autouse=True)
def wide():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def params(wide):
    return toy.params()


def one_of(group, member):
    return toy.trajectory((group, member), 6, np.repeat([0, 1], [2, 4]), 2)


def piece(group, member, start=2, end=4):
    return toy.cut(one_of(group, member), start, end)


def refused(call, names, kind=ValueError):
    with pytest.raises(kind) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for name in names:
        assert name in message, message


# Group 0 of three shares a prompt: member 0 is complete, 1 has a turn, 2 has none.
MISUSE = {
    "turn of an unknown group": (
        lambda s: s.turn(7, 0, piece(0, 0), tokens=1),
        ["group 7", "open_group"],
    ),
    "turn of a member beyond": (
        lambda s: s.turn(0, 3, piece(0, 0), tokens=1),
        ["member 3", "0 to 2"],
    ),
    "negative member": (
        lambda s: s.turn(0, -1, piece(0, 0), tokens=1),
        ["member -1", "0 to 2"],
    ),
    "turn after completion": (
        lambda s: s.turn(0, 0, piece(0, 0, 4, 6), tokens=2),
        ["a turn", "group 0 member 0", "does not change"],
    ),
    "completed twice": (lambda s: s.complete(0, 0, 1.0), ["member 0", "settled"]),
    "completed beyond": (lambda s: s.complete(0, 3, 1.0), ["member 3", "0 to 2"]),
    "failed after completion": (lambda s: s.fail(0, 0, "x"), ["member 0", "settled"]),
    "unknown group failed": (lambda s: s.fail(7, 0, "x"), ["group 7", "open_group"]),
    "NaN weight": (
        lambda s: s.complete(0, 1, np.nan),
        ["group 0 member 1", "weight nan", "finite"],
    ),
    "infinite weight": (lambda s: s.complete(0, 1, np.inf), ["weight inf", "finite"]),
    "weight in words": (lambda s: s.complete(0, 1, "1"), ["weight '1'", "finite"]),
    "no weight": (lambda s: s.complete(0, 1, None), ["weight None", "finite"]),
    "no tokens": (
        lambda s: s.turn(0, 1, piece(0, 1, 4, 6)),
        ["member 1", "tokens is missing", "'tokens'"],
    ),
    "tokens negative": (
        lambda s: s.turn(0, 1, piece(0, 1, 4, 6), tokens=-1),
        ["tokens is -1", ">= 0"],
    ),
    "another version": (
        lambda s: s.turn(0, 2, piece(0, 2), tokens=2, policy_version=8),
        ["version 8", "version 7"],
    ),
    "completion of another version": (
        lambda s: s.complete(0, 2, policy_version=8),
        ["version 8", "version 7"],
    ),
    "words in a turn": (
        lambda s: s.turn(0, 1, piece(0, 1).tree | {"text": "four"}, tokens=2),
        ["'four'", "numbers"],
    ),
    "group opened twice": (
        lambda s: s.open_group(0, 3, prompt=piece(0, 0, 0, 2)),
        ["group 0", "once"],
    ),
    "group of none": (lambda s: s.open_group(5, 0), ["group 5", "members=0"]),
    "words in a prompt": (
        lambda s: s.open_group(5, 1, prompt=piece(0, 0, 0, 2).tree | {"text": "four"}),
        ["'four'", "numbers"],
    ),
    "finish too early": (
        lambda s: s.finish(),
        ["2 members", "0/1", "0/2", "fail"],
    ),
}


def start(params):
    stream = TurnStream(toy.segments(), params, denominator="tokens", policy_version=7)
    stream.open_group(0, 3, prompt=piece(0, 0, 0, 2))
    stream.turn(0, 0, piece(0, 0), tokens=2, policy_version=7)
    stream.complete(0, 0, 0.5)
    stream.turn(0, 1, piece(0, 1), tokens=2)
    return stream


def end(params, stream):
    """The rest of the step, against what it must come to."""
    stream.turn(0, 1, piece(0, 1, 4, 6), tokens=2)
    stream.complete(0, 1, 2.0)
    stream.turn(0, 2, piece(0, 2), tokens=2)
    stream.complete(0, 2)
    found, report = stream.finish()
    ones = [
        {name: x[:n] for name, x in one_of(0, m).items()}
        for m, n in enumerate((4, 6, 4))
    ]
    loss, expected = toy.oracle(params, ones, [[0.5, 2.0, 1.0]], 8.0)
    assert toy.gap(found, expected) < EXACT
    assert report.loss == pytest.approx(loss, rel=EXACT)
    assert (report.tokens, report.kept_members, report.kept_groups) == (8, 3, 1)


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_refused_and_loses_nothing(params, case):
    call, names = MISUSE[case]
    stream = start(params)
    refused(lambda: call(stream), names)
    refused(lambda: call(stream), names)  # nor does it count as having been said
    end(params, stream)


def test_a_turn_out_of_place_is_refused(params):
    """Keys that no slot holds, or of turns that never came, were missed silently."""
    segments = toy.segments()
    stream = TurnStream(segments, params)
    stream.open_group(0, 1, prompt=piece(0, 0, 0, 2))
    refused(lambda: stream.turn(0, 0, piece(0, 0, 4, 6)), ["token 4", "behind 2"])
    stream.turn(0, 0, piece(0, 0))
    refused(lambda: stream.turn(0, 0, piece(0, 0)), ["token 2", "behind 4", "once"])
    few = Segments(segments.function, segments.empty, 3, segments.axis)
    stream = TurnStream(few, params)
    stream.open_group(0, 1, prompt=piece(0, 0, 0, 2))
    refused(lambda: stream.turn(0, 0, piece(0, 0)), ["token 4", "keeps 3", "slots"])


def test_empty_pieces_and_samples_out_of_place_are_refused(params):
    """A piece without a last token went on from padding; a sample out of place had
    keys that it should not see, or missed some."""
    segments = toy.segments("weighted")
    stream = GradientStream(segments, params, estimator=advantages.mean_only())
    refused(lambda: stream.open_group(0, 1, prompt=piece(0, 0, 2, 2)), ["0 tokens"])
    stream.open_group(0, 1, prompt=piece(0, 0, 0, 2))
    refused(lambda: stream.sample(0, 0, piece(0, 0, 3, 4)), ["token 3", "behind 2"])
    refused(lambda: stream.sample(0, 0, piece(0, 0, 2, 2)), ["0 tokens"])
    stream.sample(0, 0, piece(0, 0, 2, 4))
    turns = TurnStream(toy.segments(), params)
    refused(lambda: turns.open_group(0, 1, prompt=piece(0, 0, 2, 2)), ["0 tokens"])
    turns.open_group(0, 1, prompt=piece(0, 0, 0, 2).tree)  # of unknown length
    turns.turn(0, 0, piece(0, 0, 2, 4))
    refused(lambda: turns.turn(0, 0, piece(0, 0, 4, 4), tokens=0), ["0 tokens"])


@pytest.mark.parametrize("parts", ["weighted", "both"])
def test_a_part_for_advantages_is_refused_turn_by_turn(params, parts):
    stream = TurnStream(toy.segments(parts), params)
    stream.open_group(0, 1)
    refused(lambda: stream.turn(0, 0, piece(0, 0)), ["weighted", "additive"])


@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({"open_trajectories": 0}, ["open_trajectories is 0", "at least 1"]),
        ({"open_trajectories": True}, ["open_trajectories is True", "at least 1"]),
        ({"partial_groups": "maybe"}, ["'maybe'", "'drop', 'keep', 'fail'"]),
        ({"denominator": 0}, ["denominator is 0", "above 0"]),
        ({"context": "turn"}, ["'turn'", "Segments"]),
        ({"context": "group"}, ["'group'", "'trajectory'", "'turn'"]),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start(params, settings, names):
    refused(lambda: TurnStream(toy.segments(), params, **settings), names)


def test_whole_samples_are_refused_where_turns_read_the_past(params):
    refused(lambda: TurnStream(toy.whole(), params), ["'trajectory'", "Segments"])
    stream = TurnStream(toy.whole(), params, context="turn")
    prompt = piece(0, 0, 0, 2)
    refused(lambda: stream.open_group(0, 1, prompt=prompt), ["group 0", "Segments"])
    stream.open_group(0, 1)


def samples(params, function, parts="weighted"):
    return GradientStream(
        function(parts), params, estimator=advantages.mean_only(), release="group"
    )


def test_a_prompt_and_segments_are_refused_without_each_other(params):
    """And a refused group is not open: what it needed may follow."""
    stream = samples(params, toy.segments)
    refused(lambda: stream.open_group(0, 1), ["group 0", "no prompt", "open_group"])
    prompt = piece(0, 0, 0, 2)
    words = prompt.tree | {"text": "four"}
    refused(lambda: stream.open_group(0, 1, prompt=words), ["'four'", "numbers"])
    stream.open_group(0, 1, prompt=prompt)
    stream = samples(params, toy.whole)
    refused(
        lambda: stream.open_group(0, 1, prompt=prompt),
        ["group 0", "has a prompt", "Segments"],
    )
    stream.open_group(0, 1)


def broken(found):
    """A piece whose weights of what is additive are no numbers."""
    found.tree["a"] = np.full_like(found.tree["a"], np.nan)
    return found


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("partial", ["drop", "keep"])
def test_a_gradient_that_is_not_finite_names_its_trajectory(params, partial, turn):
    stream = TurnStream(toy.segments(), params, partial_groups=partial)
    for group in range(2):
        stream.open_group(group, 2, prompt=piece(group, 0, 0, 2))
        for member in range(2):
            pieces = [piece(group, member, s, s + 2) for s in (2, 4)]
            if (group, member) == (1, 1):
                pieces[turn] = broken(pieces[turn])
            for one in pieces:
                stream.turn(group, member, one)
            stream.complete(group, member)
    refused(stream.finish, ["group/member 1/1 is not finite"], StreamError)  # once


def test_a_sample_behind_a_prompt_that_is_not_finite_is_named(params):
    stream = GradientStream(toy.segments(), params, estimator=None)
    for group in range(2):
        stream.open_group(group, 2, prompt=piece(group, 0, 0, 2))
        for member in range(2):
            one = piece(group, member)
            bad = (group, member) == (0, 1)
            stream.complete(group, member, broken(one) if bad else one)
    refused(stream.finish, ["group/member 0/1 is not finite"], StreamError)


def test_a_trajectory_that_is_not_finite_and_fails_harms_nothing(params):
    stream = TurnStream(toy.segments(), params, partial_groups="keep")
    stream.open_group(0, 2, prompt=piece(0, 0, 0, 2))
    stream.turn(0, 0, broken(piece(0, 0)))
    stream.turn(0, 1, piece(0, 1))
    stream.fail(0, 0, "lost")
    stream.complete(0, 1)
    found, _ = stream.finish()
    one = {name: x[:4] for name, x in one_of(0, 1).items()}
    assert toy.gap(found, toy.oracle(params, [one], [[1.0]])[1]) < EXACT


def roots(p, state, sample):
    """At x = 0 the value is finite and the gradient is not."""
    own = jnp.sqrt(p * sample["x"])
    before = jnp.where(jnp.arange(len(state.kept)) < sample["start"], state.kept, 0.0)
    return Surrogate(None, jnp.sum(before) + p * sample["x"][0]), State(own, own[0])


@pytest.mark.parametrize("turns", [True, False], ids=["turns", "samples"])
def test_a_prompt_whose_gradient_is_not_finite_names_its_group(turns):
    """Those of all trajectories are."""
    function = Segments(roots, lambda n: State(jnp.zeros(n), jnp.zeros(())), 4)
    given = function, jnp.ones(())
    stream = TurnStream(*given) if turns else GradientStream(*given, estimator=None)
    for group in range(3):
        prompt = {"x": np.full(1, 0.0 if group == 1 else 1.0), "start": 0}
        stream.open_group(group, 1, prompt=prompt)
        sample = {"x": np.ones(1), "start": 1}
        if turns:
            stream.turn(group, 0, sample)
        stream.complete(group, 0, *[] if turns else [sample])
    refused(stream.finish, ["prompt of group 1 ", "not finite"], StreamError)
