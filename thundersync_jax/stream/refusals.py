"""What a gradient stream may be told, and one line for each thing that it refuses.

No jax: a config, which calls some of the checks, is read before jax starts.
"""

import math
import numbers
import operator
from collections.abc import Hashable
from typing import Any, Literal, get_args

from thundersync_jax.errors import StreamError
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.stream.schedule import Release
from thundersync_jax.types import LARGEST_REWARD, MOST_ADDENDS

Counted = Literal["none", "groups", "trajectories", "tokens"]
Denominator = Counted | float
PartialGroups = Literal["drop", "keep", "fail"]
UniformGroups = Literal["keep", "drop"]
Accumulator = Literal["plain", "exact"]
Context = Literal["trajectory", "turn"]
_CHOICES = {
    "release": get_args(Release),
    "partial_groups": get_args(PartialGroups),
    "uniform_groups": get_args(UniformGroups),
    "accumulator": get_args(Accumulator),
    "context": get_args(Context),
}


def check_choices(denominator: Any, **choices: Any) -> None:
    """Requires names of `_CHOICES`; a denominator may also be a number above 0."""
    kinds = get_args(Counted)
    if isinstance(denominator, bool) or not isinstance(denominator, numbers.Real):
        if not isinstance(denominator, str) or denominator not in kinds:
            raise ValueError(
                f"denominator is {denominator!r:.60}; expected one of "
                f"{', '.join(map(repr, kinds))}, or a number above 0"
            )
    elif not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator is {denominator!r}; expected a number above 0")
    for name, value in choices.items():
        if value not in _CHOICES[name]:
            expected = ", ".join(map(repr, _CHOICES[name]))
            raise ValueError(f"{name} is {value!r}; expected one of {expected}")


def check_uniform(uniform_groups: str, rewards: bool) -> None:
    """Requires rewards where a filter looks at them."""
    if uniform_groups != "keep" and not rewards:
        raise ValueError(
            f"uniform_groups is {uniform_groups!r} without rewards (estimator None, "
            "loss.advantage 'none'), expected 'keep': there are no rewards in the loss "
            "that could be equal. Set uniform_groups to 'keep'."
        )


def check_context(context: str, in_pieces: bool) -> None:
    """Requires pieces where a turn reads the turns before it, and only there."""
    if in_pieces != (context == "trajectory"):
        kind = "a Segments" if in_pieces else "a function of whole samples"
        raise ValueError(
            f"context is {context!r} and the surrogate is {kind}; 'trajectory' takes "
            "a Segments, 'turn' a function of a turn with its own prompt"
        )


def check_exact(dtype: Any, replicas: int, shared: bool) -> None:
    """Requires parameters below float64, and `shared` prompts on one replica."""
    if str(dtype) == "float64":
        raise ValueError(
            "accumulator is 'exact' with parameters of float64 (model.dtype), expected "
            "gradients of 32 bits: exact sums cut an addend into three integers. Use "
            "float32 parameters, or set accumulator to 'plain'."
        )
    if shared and replicas > 1:
        raise ValueError(
            "accumulator is 'exact' with shared prompts (a Segments, share_prompt "
            f"'group') and {replicas} replicas, expected 1 replica: each would round "
            "its own share of a prompt. Use one replica (mesh.replica), or set "
            "accumulator to 'plain'."
        )


def check_place(
    group: Hashable, member: int, start: int, expected: int, end: int, slots: int
) -> None:
    """Requires a piece that begins where the tokens before it end, and fits.

    `start` tokens are before the piece, as it says itself, `expected` those of the
    prompt and the turns before. Up to its last one it is `end` tokens.
    """
    check_some(group, end - start)
    if start != expected:
        raise ValueError(
            f"group {group!r} member {member} brings a turn that starts at token "
            f"{start}, behind {expected} tokens; add every turn once, in order"
        )
    if end > slots:
        raise ValueError(
            f"group {group!r} member {member} brings a turn up to token {end} and its "
            f"Segments keeps {slots}; raise its `slots`"
        )


def check_prompt(group: Hashable, has_prompt: bool, in_pieces: bool) -> None:
    """Requires a prompt where samples continue one, and only there."""
    if in_pieces and not has_prompt:
        raise ValueError(
            f"group {group!r} has no prompt and the surrogate is a Segments, whose "
            "samples continue one; give open_group the prompt"
        )
    if has_prompt and not in_pieces:
        raise ValueError(
            f"group {group!r} has a prompt and the surrogate is a function of whole "
            "samples; pass a Segments, or leave the prompt in the samples"
        )


def check_some(group: Hashable, tokens: int) -> None:
    """Requires a piece of a trajectory to have a last token."""
    if tokens < 1:
        raise ValueError(
            f"group {group!r} brings a piece of {tokens} tokens, which has no last one "
            "to go on from; leave it out"
        )


def places(release: str, scope: str, lossy: bool, open_groups: Any) -> int:
    """How many groups, or the batch, may hold sums while rewards are missing."""
    if scope == "batch":
        return int(release != "batch")
    if release != "trajectory" or not (scope == "group" or lossy):
        return 0
    check_open_groups(open_groups)
    return open_groups


def check_open_groups(open_groups: Any) -> None:
    """Requires places for the sums of groups that miss rewards."""
    if not _counts(open_groups):
        raise ValueError(
            f"open_groups is {open_groups!r} with release 'trajectory', expected at "
            "least 1 group that may hold sums. Set open_groups to 4 or release to "
            "'group'."
        )


def check_addends(group: Hashable, member: int, samples: int) -> None:
    """Requires room in an exact sum that every sample joins on its own."""
    if samples >= MOST_ADDENDS:
        raise ValueError(
            f"group {group!r} member {member} brings a sample after {samples} others; "
            f"an exact sum takes {MOST_ADDENDS}, use smaller steps or accumulator "
            "'plain'"
        )


def check_count(name: str, value: Any, way_out: str) -> None:
    """Requires a whole number above 0."""
    if not _counts(value):
        raise ValueError(f"{name} is {value!r}; {way_out}")


def check_functions(surrogate: Any, estimator: Any) -> None:
    """Requires a function that can be told from others, and an estimator or None."""
    if not callable(surrogate):
        raise ValueError(
            f"surrogate is {surrogate!r}; expected a function of (params, sample)"
        )
    try:
        hash(surrogate)
    except TypeError:
        raise ValueError(
            f"surrogate is {surrogate!r:.60}, which has no hash to find its compiled "
            "programs by; pass a function, or define __hash__"
        ) from None
    if estimator is not None and not isinstance(estimator, Estimator):
        raise ValueError(
            f"estimator is {estimator!r}; expected one that a function of "
            "`advantages` returns, as advantages.mean_std(), or None"
        )


def check_parts(parts: Any, before: Any, estimator: Estimator | None) -> None:
    """Requires the `Structure` of a sample to be that of those before, and of use."""
    if parts.weighted and estimator is None:
        raise ValueError(
            "the surrogate has a `weighted` part and estimator is None; return it as "
            "`additive`, or give an estimator and rewards"
        )
    if before not in (None, parts):
        raise ValueError(
            f"the surrogate has parts {parts} for this sample and had {before} before; "
            "every sample must have the same parts"
        )


def check_settled(outstanding: list[tuple[Hashable, int]]) -> None:
    """Requires every member to be settled."""
    if outstanding:
        names = ", ".join(f"{group!r}/{member}" for group, member in outstanding[:8])
        raise ValueError(
            f"{len(outstanding)} members are outstanding (group/member {names}); "
            "complete and reward them, or call fail, before finish"
        )


def baseline(group: Hashable, value: Any) -> float:
    """Returns what is subtracted from a group's rewards as a float."""
    expected = "expected a finite number below 1e30, in units of the reward"
    return _number(value, f"group {group!r} has baseline", expected)


def reward(
    group: Hashable, member: int, value: Any, estimator: Estimator | None
) -> float:
    """Returns a verdict as a float."""
    received = f"group {group!r} member {member} got reward"
    if estimator is None:
        raise ValueError(
            f"{received} {value!r:.60} and estimator is None, which has no use for "
            "rewards; leave them out or give one"
        )
    expected = (
        "expected a finite number below 1e30. Call fail(..., "
        "reason='invalid_reward') for a missing verdict"
    )
    return _number(value, received, expected)


def weight(group: Hashable, member: int, value: Any) -> float:
    """Returns what a trajectory's gradient is multiplied by, as a float."""
    received = f"group {group!r} member {member} completed with weight"
    expected = "expected a finite number, as one over its trained tokens"
    return _number(value, received, expected)


def tokens(group: Hashable, member: int, value: Any, needed: bool) -> int:
    """Returns a sample's count of trained tokens; 0 where none is given nor needed."""
    where = f"group {group!r} member {member}"
    if value is None:
        if needed:
            raise ValueError(
                f"{where}: tokens is missing and the denominator is 'tokens'; say how "
                "many trained tokens the sample has"
            )
        return 0
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if count < 0:
        raise ValueError(
            f"{where}: tokens is {value!r}; expected a whole number >= 0, the sample's "
            "trained tokens"
        )
    return count


def failed(group: Hashable, member: int, reason: str) -> StreamError:
    """What ends a step that takes no failed members."""
    return StreamError(
        f"group {group!r} member {member} failed ({reason}) and partial_groups is "
        "'fail'; 'drop' or 'keep' would go on without it"
    )


def check_no_tokens(group: Hashable, member: int, value: Any) -> None:
    """Requires that a completion without a sample brings no tokens either."""
    if value is not None:
        raise ValueError(
            f"group {group!r} member {member} completed with tokens={value!r} and no "
            "sample; tokens are counted by sample, pass them with it"
        )


def check_version(group: Hashable, member: int, version: Any, expected: Any) -> None:
    """Requires the step's policy version, where both are known."""
    if None not in (version, expected) and version != expected:
        raise ValueError(
            f"group {group!r} member {member} was sampled by policy version {version} "
            f"and this step is of version {expected}; a step takes trajectories of its "
            "own parameters only"
        )


def _counts(value: Any) -> bool:
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and value >= 1


def _number(value: Any, received: str, expected: str) -> float:
    try:
        text = isinstance(value, str | bytes | bytearray)
        number = math.nan if text else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) < LARGEST_REWARD:
        raise ValueError(f"{received} {value!r:.60}; {expected}")
    return number
