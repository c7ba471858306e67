"""Learner work of groups that share their prompt, against groups that do not.

    python tests/prompt_work.py

Groups of 8 trajectories without meaning, the prompt as long as all that follows it, for
a reward loss and for distillation. Nothing else runs: the time of a stream from its
first sample to its gradient is the learner's. Both ways take turns, so that a slow
machine is slow for both; of their ratios the median counts. Prints one JSON line last.
"""

import argparse
import dataclasses
import json
import statistics
import time

import jax
import numpy as np

from thundersync_jax import GradientStream
from thundersync_jax.config import LossConfig, ModelConfig
from thundersync_jax.models import transformer
from thundersync_jax.models.transformer import Transformer
from thundersync_jax.run import objective, samples
from thundersync_jax.types import StopReason, TeacherScores, Trajectory, TrajectoryKey

MODEL = ModelConfig(
    layers=4, width=256, mlp_width=768, heads=8, kv_heads=2, head_dim=32
)
GROUPS, MEMBERS, TURNS = 2, 8, 4
LOSSES = {
    "grpo": LossConfig(advantage="mean_only"),
    "opd": LossConfig(advantage="none", distill="sampled_reverse_kl"),
}


def trajectory(group: int, member: int, prompt: int) -> Trajectory:
    """One whose turns are half action, half observation."""
    rng = np.random.default_rng((group, member))
    ids = rng.integers(0, 262, 2 * prompt).astype(np.int32)
    ids[:prompt] = np.random.default_rng(group).integers(0, 262, prompt)
    place = np.arange(2 * prompt) - prompt
    mask = (place >= 0) & (place % (prompt // TURNS) < prompt // TURNS // 2)
    scores = np.full((2 * prompt, 1), -3.0, np.float32)
    return Trajectory(
        key=TrajectoryKey(1, group, member),
        ids=ids,
        loss_mask=mask,
        logprobs=np.where(mask, np.float32(-4), np.float32(0)),
        turns=TURNS,
        stop_reason=StopReason.FINISHED,
        policy_version=0,
        reward=float(member % 2),
        teacher=TeacherScores(scores, None, mask),
    )


def ways(loss: LossConfig, prompt: int):
    """(surrogate, the prompt of a trajectory, what follows) unshared and shared."""
    whole = objective.policy_surrogate(Transformer(MODEL), 1.0, loss)
    pieces = objective.policy_segments(Transformer(MODEL), 1.0, loss, 2 * prompt)

    def part(start, end=None):
        lengths = (prompt,)
        return lambda one: samples.segment_sample(one, loss, lengths, start, end)

    sample = lambda one: samples.sample(one, loss, (2 * prompt,))  # noqa: E731
    return (whole, lambda one: None, sample), (pieces, part(0, prompt), part(prompt))


def secs(way, params, loss, groups):
    """Seconds of one step of ready trajectories, and its gradient."""
    surrogate, prompt, sample = way
    prepared = [(one, sample(one)) for one in np.ravel(groups)]
    jax.block_until_ready(params)
    start = time.perf_counter()
    stream = GradientStream(
        surrogate, params, estimator=objective.estimator(loss), open_groups=GROUPS
    )
    for name, members in enumerate(groups):
        stream.open_group(name, len(members), prompt=prompt(members[0]))
    for one, tree in prepared:
        place = one.key.group, one.key.member
        stream.complete(*place, tree)
        if loss.advantage != "none":
            stream.reward(*place, one.reward)
    gradient, _ = stream.finish()
    jax.block_until_ready(gradient)
    return time.perf_counter() - start, gradient


def difference(found, expected) -> float:
    """Relative, over the whole tree."""
    norm = lambda tree: np.sqrt(  # noqa: E731
        sum(np.sum(np.square(np.float64(x))) for x in jax.tree.leaves(tree))
    )
    return float(norm(jax.tree.map(np.subtract, found, expected)) / norm(expected))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    given = parser.parse_args()
    params = transformer.init(MODEL, jax.random.key(0))
    groups = [
        [trajectory(group, member, given.prompt_tokens) for member in range(MEMBERS)]
        for group in range(GROUPS)
    ]
    result = {}
    for name, loss in LOSSES.items():
        loss = dataclasses.replace(loss)
        both = ways(loss, given.prompt_tokens)
        ratios, gradients = [], []
        for repeat in range(given.repeats + 1):
            found = [secs(way, params, loss, groups) for way in both]
            gradients = [gradient for _, gradient in found]
            if repeat:  # the first compiles
                ratios.append(found[1][0] / found[0][0])
        saved = 1 - statistics.median(ratios)
        result[name] = {
            "saved": saved,
            "saved_least": 1 - max(ratios),
            "saved_most": 1 - min(ratios),
            "difference": difference(*gradients[::-1]),
        }
        print(
            f"{name:5} learner work saved {saved:6.1%} ({1 - max(ratios):.1%} to "
            f"{1 - min(ratios):.1%}), gradients differ by "
            f"{result[name]['difference']:.1e}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
