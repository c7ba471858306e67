"""Rotary frequencies: the published scalings, and every number of them acts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from thundersync_jax.config.model import ModelConfig
from thundersync_jax.config.model_folder import RopeScaling
from thundersync_jax.errors import ConfigError
from thundersync_jax.models import layers

FLOAT64 = 1e-12  # turns are up to 300 radians
PRINTED = 4e-7  # seven digits of their float32
# Eight pairs of theta 10,000, by transformers 5.19: frequencies and attention factor.
FREQUENCIES = {
    RopeScaling("linear", 4.0): (
        "0.25 0.07905694 0.025 0.007905695 0.0025 0.0007905695 0.00025 7.905695e-05",
        1.0,
    ),
    RopeScaling("llama3", 8.0, 256): (
        "1.0 0.3162278 0.1 0.006613107 0.00125 0.0003952847 0.000125 3.952847e-05",
        1.0,
    ),
    RopeScaling("yarn", 4.0, 256): (
        "1.0 0.2569351 0.0625 0.01383497 0.0025 0.0007905695 0.00025 7.905695e-05",
        1.138629436111989,
    ),
    RopeScaling("yarn", 4.0, 256, 1.0, 4.0, 16.0, 2.0, 1.5, False): (
        "1.0 0.2915256 0.0506644 0.007905695 0.0025 0.0007905695 0.00025 7.905695e-05",
        1.5,
    ),
}


@pytest.mark.parametrize("rope", FREQUENCIES, ids=lambda rope: rope.kind)
def test_frequencies_are_those_of_transformers(rope):
    config = ModelConfig(rope=rope, rope_theta=1e4, head_dim=16)
    expected, factor = FREQUENCIES[rope]
    found = layers.frequencies(config)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, np.float64(expected.split()), rtol=PRINTED)
    assert abs(layers.attention_factor(rope) - factor) < FLOAT64


@pytest.mark.parametrize("rope", [RopeScaling(), *FREQUENCIES], ids=lambda r: r.kind)
def test_heads_are_turned_by_position_times_frequency(rope):
    config = ModelConfig(rope=rope, rope_theta=100.0, head_dim=12, dtype="float64")
    rng = np.random.default_rng(0)
    x, positions = rng.normal(size=(5, 2, 12)), np.int32([0, 1, 7, 300, 2])
    with jax.enable_x64(True):
        got = layers.rotate(config, jnp.asarray(x), jnp.asarray(positions))
        assert got.dtype == jnp.float64
    pairs = x[..., :6] + 1j * x[..., 6:]
    turns = np.exp(1j * positions[:, None, None] * layers.frequencies(config))
    pairs = pairs * turns * layers.attention_factor(rope)
    np.testing.assert_allclose(
        got, np.concatenate([pairs.real, pairs.imag], -1), FLOAT64
    )


OTHER = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 3.0,
        "original_tokens": 300,
        "low_freq_factor": 2.0,
        "high_freq_factor": 9.0,
    },
    "yarn": {
        "factor": 3.0,
        "original_tokens": 300,
        "beta_fast": 16.0,
        "beta_slow": 4.0,
        "attention_factor": 2.0,
        "truncate": False,
    },
}
NUMBERS = [f.name for f in dataclasses.fields(RopeScaling) if f.name != "kind"]
EVERY = {name: value for other in OTHER.values() for name, value in other.items()}


@pytest.mark.parametrize("kind", ["none", *OTHER])
@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_scaling_acts_or_is_refused(kind, name):
    """An accepted setting had no effect (THUDM/slime#397)."""
    values = {} if kind == "none" else {"factor": 2.0}
    if name not in OTHER.get(kind, {}):
        with pytest.raises(ConfigError, match=rf"model.rope.{name} is .* with .*kind"):
            RopeScaling(kind, **values, **{name: EVERY[name]})
        return

    def numbers(rope):
        config = ModelConfig(rope=rope, head_dim=64)
        return [*layers.frequencies(config), layers.attention_factor(rope)]

    if kind != "linear":
        values["original_tokens"] = 256
    rope = RopeScaling(kind, **values)
    changed = dataclasses.replace(rope, **{name: OTHER[kind][name]})
    assert numbers(changed) != numbers(rope)


def test_slow_frequencies_are_below_fast_ones():
    with pytest.raises(
        ConfigError, match=r"low_freq_factor is 4.0 with model.rope.high"
    ):
        RopeScaling("llama3", 2.0, low_freq_factor=4.0)
    with pytest.raises(
        ConfigError, match=r"beta_slow is 40.0 with model.rope.beta_fas"
    ):
        RopeScaling("yarn", 2.0, beta_slow=40.0)
