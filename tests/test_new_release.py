"""A further release rule: how many files it touches, and that it trains.

The rule of this test starts the gradients of a group once half of its members are
settled: later than trajectory release, sooner than group release. It is put into a copy
of the package, by exchanging lines of the files that `docs/extending.md` names.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FILES = 6
CHANGES = {
    "stream/schedule/roster.py": (
        'Release = Literal["batch", "group", "trajectory"]',
        'Release = Literal["batch", "group", "half", "trajectory"]',
    ),
    "stream/schedule/order.py": (
        """        if self._rules.release == "trajectory":
            self._offer(unit)
        return None""",
        """        half = 2 * group.unsettled <= len(group.members)
        release = self._rules.release
        if release == "trajectory" or release == "half" and half:
            self._offer(unit)
        return None""",
    ),
    "stream/refusals.py": (
        'if release != "trajectory" or not (scope == "group" or lossy)',
        'if release in ("batch", "group") or not (scope == "group" or lossy)',
    ),
    "metrics/timing.py": (
        '    if release == "group":\n',
        """    if release == "half":
        members: dict[Hashable, list[float]] = {}
        for (group, _), secs in rewarded.items():
            members.setdefault(group, []).append(secs)
        half = {g: sorted(s)[(len(s) + 1) // 2 - 1] for g, s in members.items()}
        return {key: max(secs, half[key[0]]) for key, secs in rewarded.items()}
    if release == "group":
""",
    ),
    "config/run.py": (
        'return "batch", "group", "trajectory"',
        'return "batch", "group", "half", "trajectory"',
    ),
}
PROGRAM = """
import dataclasses, json
import jax.numpy as jnp
from thundersync_jax import GradientStream, Surrogate, advantages, config
from thundersync_jax.metrics import timing


def surrogate(params, sample):
    return Surrogate(jnp.sin(params["x"]) * sample["s"])


def finish(release):
    calls = []
    stream = GradientStream(
        surrogate,
        {"x": jnp.float32(0.5)},
        estimator=advantages.mean_std(ddof=0, eps=1e-6),
        release=release,
        on_call=lambda call, done: calls.append(call),
    )
    stream.open_group("a", 4)
    started = []
    for member, reward in enumerate([1.0, 0.0, 3.0, 1.0]):
        stream.complete("a", member, {"s": jnp.float32(1 + member)}, tokens=1)
        stream.reward("a", member, reward)
        stream.drain()
        started.append(len(calls))
    gradient, report = stream.finish()
    return float(gradient["x"]), started


settings = config.Config(release="half")
rewarded = {("a", 0): 3.0, ("a", 1): 1.0, ("a", 2): 2.0, ("a", 3): 9.0}
print(json.dumps({
    "rules": settings.releases,
    "finish": {release: finish(release) for release in settings.releases},
    "secs": list(timing.release_secs(rewarded, "half").values()),
}))
"""


def test_a_release_rule_touches_few_files(tmp_path):
    package = tmp_path / "thundersync_jax"
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "thundersync_jax", package, ignore=ignore)
    assert len(CHANGES) <= MOST_FILES
    for name, (before, after) in CHANGES.items():
        text = (package / name).read_text()
        assert text.count(before) == 1, f"{name} has changed: {before!r}"
        (package / name).write_text(text.replace(before, after))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert output.returncode == 0, output.stderr
    found = json.loads(output.stdout)
    gradients = {name: gradient for name, (gradient, _) in found["finish"].items()}
    assert abs(gradients["half"] - gradients["batch"]) < 1e-6
    assert abs(gradients["batch"]) > 0.01
    started = {name: calls for name, (_, calls) in found["finish"].items()}
    assert started["batch"] == [0, 0, 0, 0]
    assert started["group"] == [0, 0, 0, 4]
    assert started["half"] == [0, 2, 3, 4]
    assert started["trajectory"] == [1, 2, 3, 4]
    assert found["secs"] == [3.0, 2.0, 2.0, 9.0]
