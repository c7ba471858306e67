"""What a config makes a step optimise, term by term, against formulas written out."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective, policy_term, samples
from thundersync_jax.stream.surrogate import Max
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

pytestmark = pytest.mark.usefixtures("quick_programs")

MODEL = ModelConfig(layers=1, width=16, mlp_width=32, heads=2, kv_heads=1, head_dim=8)
TEMPERATURE = 0.7
TOLERANCE = 1e-5  # float32: one forward pass against another program of the same sums
LIMIT = 10  # most sampled tokens of a trajectory
MASK = np.array([0, 0, 1, 1, 1, 0, 1, 1], bool)


@functools.cache
def sampler_logprobs():
    """Those of the learner, give or take a factor."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 256, len(MASK), dtype=np.int32)
    own = distributions(params(0), ids)[np.arange(len(MASK)), ids]
    return np.where(MASK, own + rng.uniform(-2, 2, len(MASK)), 0).astype(np.float32)


def trajectory(**changes):
    rng = np.random.default_rng(0)
    values = {
        "key": TrajectoryKey(3, 1, 2),
        "ids": rng.integers(0, 256, len(MASK), dtype=np.int32),
        "loss_mask": MASK,
        "logprobs": sampler_logprobs(),
        "turns": 2,
        "stop_reason": StopReason.FINISHED,
        "policy_version": 7,
        "reward": 0.75,
    }
    return Trajectory(**values | changes)


def credited():
    rng = np.random.default_rng(1)
    u, v = rng.normal(size=(2, len(MASK))).astype("f4")
    return trajectory(turn_weights=u, turn_credits=v)


def scored(one, loss):
    """A trajectory with the scores of a teacher, where the loss asks one."""
    if loss.distill == "none":
        return one
    logprobs = distributions(params(2), one.ids)
    ids = None
    if loss.teacher_kind == "sampled":
        logprobs = np.take_along_axis(logprobs, one.ids[:, None], axis=1)
    elif loss.distill_top_k:
        ids = np.argsort(-logprobs)[:, : loss.distill_top_k].astype(np.int32)
        logprobs = np.take_along_axis(logprobs, ids, axis=1)
    scores = TeacherScores(logprobs.astype(np.float32), ids, one.loss_mask)
    return dataclasses.replace(one, teacher=scores)


@functools.cache
def params(seed):
    found = jax.jit(functools.partial(transformer.init, MODEL))(jax.random.key(seed))
    return jax.tree.map(lambda x: 3 * x, found)  # far enough from uniform


def evaluated(loss, one=None):
    """(surrogate, gradients of its two parts) of a trajectory in a longer bucket."""
    sample = samples.sample(scored(one or trajectory(), loss), loss, (12,)).tree
    idle = {"constant": None, "aggregation": "sequence_mean", "advantage": "mean_only"}
    names = ["kl_coef", "kl_estimator", "entropy_coef", "importance_cap", "turn_credit"]
    names += ["distill", "distill_coef", "distill_top_k", "surrogate"]
    idle |= {name: getattr(loss, name) for name in names}
    return compiled(LossConfig(**idle))(params(0), params(1), sample)


@functools.cache  # what else a loss says comes with the sample
def compiled(loss):
    term = policy_term.load(loss)
    function = objective.policy_surrogate(
        Transformer(MODEL), TEMPERATURE, loss, term=term
    )

    @jax.jit
    def both(policy, reference, sample):
        frozen = (reference,) if loss.kl_coef else ()
        out, pull = jax.vjp(lambda p: function(p, *frozen, sample), policy)
        zero = jax.tree.map(jnp.zeros_like, out)
        gradients = {}
        for name in ("weighted", "additive"):
            if getattr(out, name) is not None:
                one = jnp.ones(())
                gradients[name] = pull(zero._replace(**{name: one}))[0]
        return out, gradients

    return both


@jax.jit
def distributions(policy, ids):
    """log-probabilities float32[T, V] of the token at each position, from plain logits;
    those of position 0 are made up and never trained."""
    hidden, _ = transformer.segment(MODEL, policy, jnp.asarray(ids))
    logits = transformer.logits(MODEL, transformer.head_weights(policy), hidden)
    found = jax.nn.log_softmax(logits / TEMPERATURE)
    return jnp.concatenate([found[:1], found[:-1]])


def expected(loss, one):
    """Gradients of the two parts, written out token by token."""
    w = np.where(MASK, 1 / MASK.sum(), 0)
    u, v = np.ones(len(MASK)), np.zeros(len(MASK))
    if loss.turn_credit == "environment" and one.turn_weights is not None:
        u, v = one.turn_weights, one.turn_credits
    chosen = np.arange(len(MASK)), one.ids
    old = distributions(params(0), one.ids)[chosen]
    rho = np.ones(len(MASK))
    if loss.importance_cap is not None:
        rho = np.minimum(np.exp(old - one.logprobs), loss.importance_cap)

    coefs = np.array([loss.kl_coef, loss.entropy_coef])
    return written_out(params(0), params(1), one.ids, w, rho * u, rho * v, coefs)


@jax.jit
def written_out(policy, reference, ids, w, u, v, coefs):
    chosen = jnp.arange(len(ids)), ids
    other = distributions(reference, ids)[chosen]

    def weighted(p):
        return -jnp.sum(w * u * distributions(p, ids)[chosen])

    def additive(p):
        table = distributions(p, ids)
        kl = jnp.sum(w * (table[chosen] - other) ** 2 / 2)  # whose gradient is right
        entropy = -jnp.sum(w * jnp.sum(jnp.exp(table) * table, axis=-1))
        credit = -jnp.sum(w * v * table[chosen])
        return credit + coefs[0] * kl - coefs[1] * entropy

    return {
        "weighted": jax.grad(weighted)(policy),
        "additive": jax.grad(additive)(policy),
    }


def assert_close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = max(float(jnp.max(jnp.abs(b))), 1e-3)
        np.testing.assert_allclose(a, b, atol=TOLERANCE * scale, rtol=TOLERANCE)


def norm(tree):
    return float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree))))


LOSSES = {
    "nothing": LossConfig(),
    "kl": LossConfig(kl_coef=0.5),
    "entropy": LossConfig(entropy_coef=0.25),
    "cap": LossConfig(importance_cap=2.0),
    "credit": LossConfig(turn_credit="environment"),
    "everything": LossConfig(
        kl_coef=0.5, entropy_coef=0.25, importance_cap=2.0, turn_credit="environment"
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_those_of_the_formulas(name):
    loss = LOSSES[name]
    one = credited() if loss.turn_credit == "environment" else trajectory()
    _, gradients = evaluated(loss, one)
    wanted = expected(loss, one)
    for part, gradient in gradients.items():
        assert norm(gradient) > 1e-3
        assert_close(gradient, wanted[part])
    assert ("additive" in gradients) == (name not in ("nothing", "cap"))
    assert loss.has_additive == ("additive" in gradients)


def test_coefficient_of_the_kl_acts_on_the_gradient():
    """It was computed without gradient (NovaSky-AI/SkyRL#1353)."""
    assert evaluated(LOSSES["nothing"])[0].additive is None
    assert norm(evaluated(LOSSES["kl"])[1]["additive"]) > 1e-2


def test_kl_and_entropy_are_reported_as_sums_over_trained_tokens():
    one = trajectory()  # without credit of its own
    out, _ = evaluated(LOSSES["everything"], one)
    here, there = (distributions(params(seed), one.ids) for seed in (0, 1))
    chosen = np.arange(len(MASK)), one.ids
    gap = here[chosen] - there[chosen]
    kl = np.sum(np.where(MASK, np.exp(-gap) - 1 + gap, 0))
    entropy = np.sum(np.where(MASK, -np.sum(np.exp(here) * here, -1), 0))
    assert out.metrics["kl"] == pytest.approx(float(kl), rel=1e-4)
    assert out.metrics["entropy"] == pytest.approx(float(entropy), rel=1e-4)
    tokens = MASK.sum()
    assert out.additive == pytest.approx((0.5 * kl - 0.25 * entropy) / tokens, rel=1e-4)


def test_mismatch_is_always_measured_and_is_no_metric():
    """Metrics keep samples of advantage 0 from being skipped; this must not."""
    out, _ = evaluated(LossConfig())
    one = trajectory()
    here = distributions(params(0), one.ids)[np.arange(len(MASK)), one.ids]
    gap = np.where(MASK, here - one.logprobs, 0)
    assert not out.metrics
    found = out.diagnostics
    assert found["mismatch_tokens"] == MASK.sum()
    size = float(np.abs(gap).sum())
    assert found["mismatch_abs_log_ratio"] == pytest.approx(size, rel=1e-4)
    kl = float(np.sum(np.exp(gap) - 1 - gap))
    assert found["mismatch_kl"] == pytest.approx(kl, rel=1e-4)
    largest = found["mismatch_max_abs_log_ratio"]
    assert isinstance(largest, Max)
    assert largest.value == pytest.approx(float(np.abs(gap).max()), rel=1e-4)


def test_what_stands_outside_the_mask_reaches_nothing():
    """0 * NaN is NaN (NovaSky-AI/SkyRL#1633)."""
    loss = LOSSES["everything"]
    clean = credited()
    dirty = dataclasses.replace(
        clean, logprobs=np.where(MASK, clean.logprobs, -np.inf).astype("f4")
    )
    values = [evaluated(loss, one)[0] for one in (clean, dirty)]
    for a, b in zip(*map(jax.tree.leaves, values), strict=True):
        assert np.isfinite(a) and a == b


def test_turn_credit_that_nobody_asked_for_is_refused():
    with pytest.raises(ConfigError, match=r"group 1 member 2 .*loss\.turn_credit"):
        samples.sample(credited(), LossConfig(), (12,))
    # And where the environment gives none, a turn is worth the advantage alone.
    asked = evaluated(LossConfig(turn_credit="environment"))
    plain = evaluated(LossConfig())
    assert asked[0].additive == 0
    assert_close(asked[1]["weighted"], plain[1]["weighted"])


def test_length_penalty_grows_between_the_free_tokens_and_the_limit():
    assert samples.shaped_reward(trajectory(), LossConfig(), LIMIT) == 0.75
    loss = LossConfig(length_penalty=0.5)
    assert samples.shaped_reward(trajectory(), loss, LIMIT) == 0.75 - 0.5 * 5 / 10
    loss = LossConfig(length_penalty=0.5, length_free_tokens=4)
    shaped = samples.shaped_reward(trajectory(), loss, LIMIT)
    assert shaped == pytest.approx(0.75 - 0.5 * 1 / 6)


def test_empty_samples_have_the_shapes_of_real_ones():
    for loss in LOSSES.values():
        real = samples.sample(scored(trajectory(), loss), loss, (12,)).tree
        empty = samples.untrained(12, None, loss, MODEL.vocab_size)
        made_up = samples.sample(empty, loss, (12,)).tree
        assert {k: (x.shape, x.dtype) for k, x in real.items()} == {
            k: (x.shape, x.dtype) for k, x in made_up.items()
        }
        assert not made_up["weights"].any() and not made_up["mask"].any()


STD = "leave_one_out_std"
# For every setting of the loss two values that must not mean the same, in a loss where
# it is in use.
ACTING = {
    "aggregation": ({}, "sequence_mean", "token_mean"),
    "constant": ({"aggregation": "constant"}, 8.0, 9.0),
    "surrogate": ({}, "policy_gradient", "own_losses:cispo"),
    "advantage": ({}, "mean_std", "own_estimators:ranks"),
    "std_ddof": ({"advantage": STD}, 0, 1),
    "std_eps": ({"advantage": STD}, 1e-6, 0.1),
    "pass_k": ({"advantage": "pass_at_k"}, 2, 3),
    "baseline": ({"advantage": "fixed_baseline"}, 0.0, 0.5),
    "baseline_decay": ({"advantage": "tracked_baseline"}, 0.5, 0.9),
    "kl_coef": ({}, 0.0, 0.5),
    "kl_estimator": ({"kl_coef": 0.5}, "k1", "k3"),
    "entropy_coef": ({}, 0.0, 0.25),
    "length_penalty": ({}, 0.0, 0.5),
    "length_free_tokens": ({"length_penalty": 0.5}, 0, 3),
    "importance_cap": ({}, None, 2.0),
    "turn_credit": ({}, "none", "environment"),
    "truncated": ({}, "keep", "mask"),
    "distill": ({}, "sampled_reverse_kl", "jensen_shannon"),
    "distill_coef": ({"distill": "reverse_kl"}, 1.0, 0.5),
    "distill_top_k": ({"distill": "forward_kl"}, 2, None),
}
REWARDS = [0.0, 0.0, 1.0, 0.25, 1.0]


def fingerprint(loss):
    """Everything that a loss decides, as numbers, of one that was cut off."""
    one = credited() if loss.turn_credit == "environment" else trajectory()
    one = dataclasses.replace(one, stop_reason=StopReason.TURN_LIMIT)
    out, gradients = evaluated(loss, one)
    tracked = objective.baselines(loss)
    seen = [tracked.value("x")]
    for rewards in ([1.0], [0.0, 1.0], [0.5]):
        tracked.update({"x": rewards})
        seen.append(tracked.value("x"))
    scope = objective.estimator(loss)
    return [
        *scope.advantages(REWARDS).tolist(),
        ["member", "group", "batch"].index(scope.scope),
        *(seen if loss.advantage == "tracked_baseline" else ()),
        objective.denominator(loss) == "tokens",
        float(samples.sample(scored(one, loss), loss, (12,)).tree["weights"].sum()),
        samples.shaped_reward(one, loss, LIMIT),
        float(out.weighted),
        float(out.additive or 0.0),
        *(norm(gradient) for gradient in gradients.values()),
    ]


@pytest.mark.parametrize(
    "name", [field.name for field in dataclasses.fields(LossConfig)]
)
def test_every_setting_of_the_loss_acts(name):
    """An accepted setting had no effect (THUDM/slime#397)."""
    context, *values = ACTING[name]
    one, other = (fingerprint(LossConfig(**context, **{name: v})) for v in values)
    assert one != pytest.approx(other, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "wanted", "scope"),
    [
        ({"advantage": "mean_std", "std_eps": 0.0}, [-1, -1, 1, 1], "group"),
        ({"advantage": "mean_std", "std_eps": 0.5}, [-0.5, -0.5, 0.5, 0.5], "group"),
        ({"advantage": "mean_only"}, [-0.5, -0.5, 0.5, 0.5], "group"),
        ({"advantage": "leave_one_out"}, [-2 / 3, -2 / 3, 2 / 3, 2 / 3], "group"),
        ({"advantage": "batch_mean_std", "std_eps": 0.0}, [-1, -1, 1, 1], "batch"),
        (
            {"advantage": "fixed_baseline", "baseline": 0.5},
            [-0.5] * 2 + [0.5] * 2,
            None,
        ),
        ({"advantage": "tracked_baseline", "baseline": 0.5}, [0, 0, 1, 1], None),
    ],
)
def test_names_of_a_config_are_the_estimators_of_their_papers(settings, wanted, scope):
    found = objective.estimator(LossConfig(**settings))
    np.testing.assert_allclose(found.advantages([0.0, 0.0, 1.0, 1.0]), wanted)
    assert found.scope == (scope or "member")


def test_estimators_whose_numbers_need_three_rewards():
    loss = LossConfig(advantage="leave_one_out_std", std_ddof=1, std_eps=0.0)
    found = objective.estimator(loss).advantages([2.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(found, [2.886751, 0.288675, -1, -1], atol=1e-6)
    loss = LossConfig(advantage="pass_at_k", pass_k=2)
    assert len(set(objective.estimator(loss).advantages([2.0, 1.0, 0.0, 0.0]))) == 3
