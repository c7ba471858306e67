"""What length takes off a reward."""

import numpy as np
import pytest

from thundersync_jax.ops import advantages


def test_the_penalty_grows_from_the_free_length_to_the_limit():
    """DAPO (arXiv 2503.14476): L_max 20,480, L_cache 4,096, penalty 1."""
    lengths = [0, 16_384, 17_408, 18_432, 20_480, 30_000]
    got = [advantages.length_penalty(n, 16_384, 20_480, 1.0) for n in lengths]
    assert got == [0.0, 0.0, 0.25, 0.5, 1.0, 1.0]


def test_the_penalty_is_in_units_of_the_reward():
    assert advantages.length_penalty(15, 10, 20, 0.3) == 0.15
    assert advantages.length_penalty(20, 10, 20, 0.3) == 0.3
    assert advantages.length_penalty(20, 10, 20, 0.0) == 0.0


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ((20, 20, 1.0), "free_tokens=20, limit_tokens=20"),
        ((-1, 20, 1.0), "free_tokens=-1"),
        ((10, 20, -1.0), "penalty is -1.0"),
        ((10, 20, np.nan), "penalty is nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        advantages.length_penalty(5, *settings)
