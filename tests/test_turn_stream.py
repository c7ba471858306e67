"""Turn by turn: the update of whole trajectories, in another order of work."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
import turns_of_models as models
from turns_of_models import MODEL, OPD, difference, of_samples, of_turns

from thundersync_jax.config import LossConfig
from thundersync_jax.models import layers, transformer
from thundersync_jax.models.transformer import KeyValues
from thundersync_jax.stream import mesh, segments

pytestmark = pytest.mark.usefixtures("quick_programs")

EXACT = 1e-12  # rounding of float64 sums of some hundred terms
FLOAT32 = 1e-5  # the same in float32
SEVERED = 1e-6  # what a channel carries at least
HALF = 2.0**-8  # of one bfloat16 rounding
FULL = LossConfig(advantage="none", distill="reverse_kl", entropy_coef=0.01)
TOP = LossConfig(advantage="none", distill="forward_kl", distill_top_k=3, kl_coef=0.05)
LOSSES = {"sampled": OPD, "full and entropy": FULL, "top-k and reference": TOP}


@pytest.fixture(scope="module")
def params():
    with jax.enable_x64(True):
        yield models.init()


def frozen_of(loss):
    return models.init(seed=4) if loss.kl_coef else None


@pytest.mark.parametrize("shared", [False, True], ids=["own prompt", "shared prompt"])
@pytest.mark.parametrize("name", LOSSES)
def test_turns_equal_trajectories_equal_batch(params, name, shared):
    loss = LOSSES[name]
    for aggregation, constant in (
        ("sequence_mean", None),
        ("token_mean", None),
        ("constant", 9.0),
    ):
        of = dataclasses.replace(loss, aggregation=aggregation, constant=constant)
        ones, given = models.step(of), {"compiled": loss, "frozen": frozen_of(loss)}
        expected, whole = of_samples(params, ones, of, release="batch", **given)
        trajectory, _ = of_samples(params, ones, of, release="trajectory", **given)
        found, report = of_turns(params, ones, of, shared=shared, **given)
        assert difference(found, expected) < EXACT
        assert difference(trajectory, expected) < EXACT
        assert report.loss == pytest.approx(whole.loss, rel=EXACT)
        assert report.gradient_norm == pytest.approx(whole.gradient_norm, rel=EXACT)
        assert (report.tokens, report.denominator) == (whole.tokens, whole.denominator)
        for metric, value in whole.metrics.items():
            assert report.metrics[metric] == pytest.approx(value, rel=EXACT)


# Every piece begins with a trained token: the hidden vector before it has a gradient.
CUTS = [[[(0, 4), (0, 3), (0, 4)]]]


@pytest.fixture(scope="module")
def uncut(params):
    return of_samples(params, models.step(OPD, CUTS), OPD)[0]


def severed_run(params):
    return of_turns(params, models.step(OPD, CUTS), OPD, shared=True, shapes=CUTS)[0]


def start_of(turn):
    return models.turns_of(0, 0, True, CUTS)[turn][0]


def without(pulled, before, channel):
    """Cotangents of which one kind is as it was before."""
    (now,), (then,) = pulled, before
    return [now._replace(**{channel: getattr(then, channel)})]


def test_pieces_that_begin_with_a_trained_token_equal_the_whole(params, uncut):
    assert difference(severed_run(params), uncut) < EXACT


@pytest.mark.parametrize("channel", ["keys", "values", "last"])
@pytest.mark.parametrize("turn", [0, 1, 2])
def test_no_channel_into_the_past_may_be_severed(
    params, uncut, monkeypatch, turn, channel
):
    """Of what a turn's loss pulls of keys, values or the hidden vector before it."""
    original, cuts = segments.turn, []

    def cut(function, p, frozen, state, pulled, sample):
        found = original(function, p, frozen, state, pulled, sample)
        if int(sample["start"]) != start_of(turn):
            return found
        cuts.append(turn)
        if channel == "last":
            return found._replace(of_last=jax.tree.map(jnp.zeros_like, found.of_last))
        return found._replace(pulled=without(found.pulled, pulled, channel))

    monkeypatch.setattr(segments, "turn", cut)
    assert difference(severed_run(params), uncut) > SEVERED
    assert cuts == [turn]


@pytest.mark.parametrize("channel", ["keys", "values"])
@pytest.mark.parametrize("turn", [0, 1])
def test_no_channel_of_a_replay_may_be_severed(
    params, uncut, monkeypatch, turn, channel
):
    """What a replayed turn passes on to those before it, and to the prompt."""
    original, cuts = segments.replay, []

    def cut(function, p, frozen, state, pulled, *rest):
        found = original(function, p, frozen, state, pulled, *rest)
        start = int(rest[-1]["start"])
        if start != start_of(turn):
            return found
        cuts.append(turn)
        then = jax.tree.map(lambda x: x.at[:, start:].set(0), pulled)
        return found._replace(pulled=without(found.pulled, then, channel))

    monkeypatch.setattr(segments, "replay", cut)
    assert difference(severed_run(params), uncut) > SEVERED
    assert cuts == [turn]


def test_turns_and_prompts_on_a_mesh_equal_one_device(params):
    with jax.enable_x64(False):
        model = dataclasses.replace(MODEL, dtype="float32")
        alone = models.float32(params)
        ones = models.step(OPD)
        expected, _ = of_samples(alone, ones, OPD, model=model)
        grid = mesh.make_mesh(fsdp=2, tensor=2)
        layout = mesh.parameter_shardings(
            grid, alone, transformer.logical_axes(model), layers.MESH_AXES
        )
        spread = jax.device_put(alone, layout)
        leaves = jax.tree.leaves(spread)
        assert any(x.sharding.shard_shape(x.shape) != x.shape for x in leaves)
        for run in (of_turns, of_samples):
            found, _ = run(spread, ones, OPD, shared=True, model=model)
            assert difference(found, expected) < FLOAT32
            for x, y in zip(*map(jax.tree.leaves, (found, spread)), strict=True):
                assert x.sharding.is_equivalent_to(y.sharding, x.ndim)


def test_cotangents_of_a_bfloat16_model_add_up_in_float32(params, monkeypatch):
    seen, original = [], segments.turn

    def watched(*arguments):
        found = original(*arguments)
        seen.append(found)
        return found

    monkeypatch.setattr(segments, "turn", watched)
    with jax.enable_x64(False):
        half, ones = models.float32(params), models.step(OPD)
        given = {"model": dataclasses.replace(MODEL, dtype="bfloat16")}
        found, _ = of_turns(half, ones, OPD, shared=True, **given)
        given["model"] = dataclasses.replace(MODEL, dtype="float32")
        expected, _ = of_samples(half, ones, OPD, **given)
    for turn in seen:
        (kept,), (pulled,) = turn.state.kept, turn.pulled
        assert isinstance(kept, KeyValues)
        assert {x.dtype for x in kept} == {jnp.dtype(jnp.bfloat16)}
        assert {x.dtype for x in pulled} == {jnp.dtype(jnp.float32)}
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}
    assert HALF / 8 < difference(found, expected) < 8 * HALF
