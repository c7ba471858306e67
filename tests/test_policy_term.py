"""Policy terms of one's own: what they compute, and what is refused before a run."""

import jax
import jax.numpy as jnp
import numpy as np
import own_estimators
import own_losses
import pytest
from test_objective import (
    MASK,
    MODEL,
    TEMPERATURE,
    assert_close,
    credited,
    distributions,
    params,
    trajectory,
)

from thundersync_jax.config import LossConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective, policy_term, samples

pytestmark = pytest.mark.usefixtures("quick_programs")

WEIGHTS = np.where(MASK, 1 / MASK.sum(), 0)


def gradients(loss, one):
    """{part: gradient} of a surrogate of a model, and its metrics."""
    term = policy_term.load(loss)
    surrogate = objective.policy_surrogate(
        Transformer(MODEL), TEMPERATURE, loss, term=term
    )
    sample = samples.sample(one, loss, (12,)).tree
    frozen = (params(1),) if objective.with_reference(loss, term) else ()

    @jax.jit
    def both(policy):
        out, pull = jax.vjp(lambda p: surrogate(p, *frozen, sample), policy)
        zero = jax.tree.map(jnp.zeros_like, out)
        return out, {
            name: pull(zero._replace(**{name: jnp.ones(())}))[0]
            for name in ("weighted", "additive")
            if getattr(out, name) is not None
        }

    out, found = both(params(0))
    return found, out.metrics


def of_weights(one, weights):
    """The gradient of - sum_t w_t log pi, from plain logits."""
    chosen = np.arange(len(one.ids)), one.ids
    loss = lambda p: -jnp.sum(weights * distributions(p, one.ids)[chosen])  # noqa: E731
    return jax.jit(jax.grad(loss))(params(0))


def entropy_gradient(one):
    def loss(p):
        table = distributions(p, one.ids)
        return 0.25 * jnp.sum(WEIGHTS * jnp.sum(jnp.exp(table) * table, axis=-1))

    return jax.jit(jax.grad(loss))(params(0))


def ratios(one, policy=0):
    here = distributions(params(policy), one.ids)[np.arange(len(one.ids)), one.ids]
    return np.exp(np.where(MASK, here - one.logprobs, 0))


def test_detached_ratios_weigh_tokens():
    one = trajectory()
    found, metrics = gradients(LossConfig(surrogate="own_losses:cispo"), one)
    assert found.keys() == {"weighted"}
    ratio = ratios(one)
    assert_close(found["weighted"], of_weights(one, WEIGHTS * np.minimum(ratio, 1.2)))
    assert metrics["cut"] == np.sum(MASK & (ratio > 1.2)) > 0


def test_a_ratio_of_the_sequence_is_one_number():
    one = trajectory()
    found, _ = gradients(LossConfig(surrogate="own_losses:sequence_ratio"), one)
    ratio = np.exp(np.sum(np.log(ratios(one))) / MASK.sum())
    assert_close(found["weighted"], of_weights(one, WEIGHTS * ratio))


def test_a_loss_of_the_advantage_is_split_into_its_parts():
    one = trajectory()
    plain, _ = gradients(LossConfig(surrogate="own_losses:reinforce"), one)
    both, _ = gradients(LossConfig(surrogate="own_losses:with_entropy"), one)
    assert plain.keys() == {"weighted"} and both.keys() == {"weighted", "additive"}
    for found in (plain, both):
        assert_close(found["weighted"], of_weights(one, WEIGHTS))
    assert_close(both["additive"], entropy_gradient(one))


def test_terms_of_the_settings_are_added_to_it():
    loss = LossConfig(surrogate="own_losses:reinforce", entropy_coef=0.25)
    found, metrics = gradients(loss, trajectory())
    assert_close(found["additive"], entropy_gradient(trajectory()))
    assert metrics.keys() == {"entropy"}


def test_a_term_that_reads_the_reference_gets_it():
    loss = LossConfig(surrogate="own_losses:near_reference")
    one = trajectory()
    found, _ = gradients(loss, one)
    there = distributions(params(1), one.ids)[np.arange(len(one.ids)), one.ids]
    likely = np.where(there > -40.0, WEIGHTS, 0)
    assert 0 < np.count_nonzero(likely) < MASK.sum()
    assert_close(found["weighted"], of_weights(one, likely))


def test_credit_of_turns_reaches_it():
    settings = {"turn_credit": "environment"}
    loss = LossConfig(surrogate="own_losses:credited", **settings)
    one = credited()
    found, _ = gradients(loss, one)
    assert_close(found["weighted"], of_weights(one, WEIGHTS * one.turn_weights))
    assert_close(found["additive"], of_weights(one, WEIGHTS * one.turn_credits))
    with pytest.raises(ConfigError, match=r"reads no credit .*Tokens\.turn_weights"):
        policy_term.load(LossConfig(surrogate="own_losses:reinforce", **settings))
    with pytest.raises(
        ConfigError, match=r"reads the credit .*loss\.turn_credit is 'none'"
    ):
        policy_term.load(LossConfig(surrogate="own_losses:credited"))


def test_what_a_run_has_to_know_of_a_term():
    known = {
        name: policy_term.load(LossConfig(surrogate=f"own_losses:{name}"))
        for name in ("cispo", "with_entropy", "sequence_ratio", "near_reference")
    }
    assert {k for k, x in known.items() if x.additive} == {"with_entropy"}
    assert {k for k, x in known.items() if not x.of_turns} == {"sequence_ratio"}
    assert known["with_entropy"].reads == {"entropies"}
    assert known["near_reference"].reads == {"reference_logprobs"}
    known["cispo"].check_turns()
    with pytest.raises(ConfigError, match="release is 'turn' with a loss.surrogate"):
        known["sequence_ratio"].check_turns()


REFUSED = {
    own_losses.ppo: "lie on no line",
    own_losses.ppo_gradient: "lie on no line",
    own_losses.squared: "lie on no line",
    own_losses.mean_of_all: "depends on tokens that are not trained",
    own_losses.unmasked: "depends on tokens that are not trained",
    own_losses.by_position: "depends on tokens that are not trained",
    own_losses.nothing_to_divide_by: "gives NaN or infinity",
    own_losses.per_token: "expected a scalar",
    own_losses.number: "expected Surrogate",
    own_losses.three_arguments: r"takes 3 arguments, expected term\(tokens\)",
    own_losses.no_function: "TypeError: 0.5 is not a callable",
    own_losses.named_loss: "returns metrics named loss",
    own_losses.largest: "returns metrics named worst",
}


@pytest.mark.parametrize("factory", REFUSED, ids=lambda f: f.__name__)
def test_a_term_that_cannot_be_streamed_is_refused_by_name(factory):
    name = f"own_losses:{factory.__name__}"
    for load, shown in (
        (lambda: policy_term.load(LossConfig(surrogate=name)), name),
        (lambda: policy_term.load(LossConfig(), factory), factory.__name__),
    ):
        with pytest.raises(ConfigError, match=REFUSED[factory]) as refused:
            load()
        assert f"loss.surrogate {shown}".replace("'", "") in str(refused.value).replace(
            "'", ""
        )
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"importance_cap": 2.0}, r"importance_cap is 2\.0 with loss\.surrogate"),
        ({"surrogate": "own_losses:missing"}, "has no function 'missing'"),
        (
            {"advantage": "none", "distill": "reverse_kl"},
            "part for the advantage while loss.advantage is 'none'",
        ),
        (
            {
                "surrogate": "own_losses:cispo",
                "advantage": "none",
                "distill": "reverse_kl",
            },
            "part for the advantage while loss.advantage is 'none'",
        ),
    ],
)
def test_settings_that_do_not_go_with_a_term_are_refused(settings, message):
    loss = LossConfig(**{"surrogate": "own_losses:reinforce"} | settings)
    with pytest.raises(ConfigError, match=message):
        policy_term.load(loss)


@pytest.mark.parametrize("name", ["surrogate", "advantage"])
def test_a_name_that_nothing_has_is_refused_where_it_is_set(name):
    with pytest.raises(ConfigError, match=rf"loss\.{name} is 'x', expected one of"):
        LossConfig(**{name: "x"})
    with pytest.raises(ConfigError, match=rf"loss\.{name} is 'x:', expected an import"):
        LossConfig(**{name: "x:"})


def test_estimators_are_found_by_name_made_by_a_function_or_given():
    wanted = [-0.5, 0.5]
    by_name = "own_estimators:{}".format
    for loss, given in (
        (LossConfig(advantage=by_name("CENTRED")), None),
        (LossConfig(advantage=by_name("centred")), None),
        (LossConfig(), own_estimators.CENTRED),
        (LossConfig(), own_estimators.centred),
    ):
        found = objective.estimator(loss, given)
        np.testing.assert_allclose(found.advantages([0.0, 1.0]), wanted)
        assert found.name == "centred"
    with pytest.raises(ConfigError, match="expected an ops.advantages.Estimator"):
        objective.estimator(LossConfig(advantage=by_name("wrong")))
    with pytest.raises(ConfigError, match="is given with loss.advantage 'tracked"):
        loss = LossConfig(advantage="tracked_baseline")
        objective.estimator(loss, own_estimators.CENTRED)
