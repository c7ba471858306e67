"""How rotary frequencies are stretched for contexts beyond those of pretraining.

The kinds that Qwen and Llama are published with; the frequencies themselves are in
`models/layers.py`.
"""

import dataclasses
from typing import Literal

from thundersync_jax.config.checks import effective, positive, require
from thundersync_jax.config.settings import check_types

Kind = Literal["none", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """One kind of stretching and its numbers; those of other kinds keep their defaults.

    Source: linear arXiv 2306.15595, llama3 arXiv 2407.21783, yarn arXiv 2309.00071.
    """

    kind: Kind = "none"  # as config.json names it; none: "default" there
    factor: float = 1.0  # slow frequencies are divided by it; linear: all of them
    original_tokens: int = 8192  # context of pretraining, of llama3 and yarn
    low_freq_factor: float = 1.0  # llama3: fewer turns in that context are slow
    high_freq_factor: float = 4.0  # llama3: more turns are left as they are
    beta_fast: float = 32.0  # yarn: more turns in that context are left as they are
    beta_slow: float = 1.0  # yarn: fewer turns are slow
    attention_factor: float | None = None  # yarn: of cos and sin; none: of the factor
    truncate: bool = True  # yarn: the ramp between them ends at whole pairs

    def __post_init__(self):
        prefix = "model.rope."
        check_types(self, prefix)
        sizes = ["factor", "original_tokens", "low_freq_factor", "high_freq_factor"]
        positive(self, prefix, [*sizes, "beta_fast", "beta_slow"])
        if self.attention_factor is not None:
            positive(self, prefix, ["attention_factor"])
        for names, kinds in (
            (["factor"], ("linear", "llama3", "yarn")),
            (["original_tokens"], ("llama3", "yarn")),
            (["low_freq_factor", "high_freq_factor"], ("llama3",)),
            (["beta_fast", "beta_slow", "attention_factor", "truncate"], ("yarn",)),
        ):
            effective(self, prefix, names, "kind", kinds)
        for slow, fast in (
            ("low_freq_factor", "high_freq_factor"),
            ("beta_slow", "beta_fast"),
        ):
            require(
                getattr(self, slow) < getattr(self, fast),
                f"{prefix}{slow} is {getattr(self, slow)} with {prefix}{fast} "
                f"{getattr(self, fast)}",
                "less: slow frequencies turn less often than fast ones",
                f"Lower {prefix}{slow}.",
            )
