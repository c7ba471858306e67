"""`GradientStream`: the gradient of one step, computed while its rewards arrive.

Tell it of groups, samples, completions, rewards and failures in any order; `finish()`
returns the gradient of

    loss(params) = (1 / Z) * [ sum_i A_i * weighted_i + sum_i additive_i ]

over the members that count. The parameters are fixed for the life of a stream, so the
order of events changes nothing but the rounding of sums. It knows no model, no
environment and no optimizer, and it starts no thread.
"""

import math
import threading
from collections.abc import Callable, Hashable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import accumulator, mesh
from thundersync_jax.buckets import Padded
from thundersync_jax.errors import StreamError
from thundersync_jax.ledger import Denominator, Ledger, Report, SampleRecord
from thundersync_jax.ops.advantages import Estimator
from thundersync_jax.replica import IN_FLIGHT, Replica
from thundersync_jax.schedule import Call, Close, Release, Schedule
from thundersync_jax.surrogate import Structure, Surrogate, structure

Tree = Any
PartialGroups = Literal["drop", "keep", "fail"]

# What has been traced and compiled, for all streams of the process, as jit's own cache.
_STRUCTURES: dict[Hashable, Structure] = {}
_PROGRAMS: set[Hashable] = set()


class GradientStream:
    """Collects one step and returns its gradient. One thread owns a stream.

    Args:
      surrogate: Maps (params, sample) to a `Surrogate`, or (params, frozen, sample)
        where `frozen` is given. Pass the same function object in every step: compiled
        programs belong to it.
      params: Parameters to differentiate, floating-point arrays. Where they lie on a
        mesh with an axis named "replica", every index of it works on its own.
      estimator: Group advantage (module `advantages`), or None where there are no
        rewards: then `complete` settles a member and everything is `additive`.
      denominator: Z: "none" (1), "groups" or "trajectories" kept, their "tokens", or a
        number.
      release: When a gradient may start: "batch" once `finish` is called, "group" once
        all rewards of its group are in, "trajectory" once its own reward is in.
      open_groups: How many incomplete groups may hold sums, each 2 or 3 times the
        parameters' size in float32. Needed under "trajectory" release only.
      partial_groups: What a group with failed members does: "drop" leaves nothing of
        it, "keep" makes its survivors the group, "fail" ends the step with an error.
      policy_version: Of `params`; samples of another one are refused. Where it is None
        the first version seen is the one.
      frozen: Further arrays for the surrogate, such as a reference policy. No gradient.
      rows_per_call: How many samples share a gradient call where enough are waiting
        whose coefficients are known.
      on_call: Called with each `Call` and an array that is ready when it has ended.
      on_compile: Called with one line before a gradient program compiles.

    Raises:
      ValueError: A setting is not one of the above, or settings contradict each other.
    """

    def __init__(
        self,
        surrogate: Callable[..., Surrogate],
        params: Tree,
        *,
        estimator: Estimator | None,
        denominator: Denominator = "trajectories",
        release: Release = "trajectory",
        open_groups: int = 4,
        partial_groups: PartialGroups = "drop",
        policy_version: int | None = None,
        frozen: Tree = None,
        rows_per_call: int = 1,
        on_call: Callable[[Call, jax.Array], None] | None = None,
        on_compile: Callable[[str], None] | None = None,
    ):
        _check_settings(denominator, release, partial_groups, rows_per_call)
        held = estimator is not None or partial_groups == "drop"
        if release == "trajectory" and held and open_groups < 1:
            raise ValueError(
                f"open_groups is {open_groups} with release 'trajectory', which sums "
                "unfinished groups; give at least 1, or release 'group' or 'batch'"
            )
        self._surrogate = surrogate
        self._params = jax.tree.map(_parameter, params)
        self._frozen = frozen
        self._estimator = estimator
        self._denominator = denominator
        self._partial = partial_groups
        self._version = policy_version
        self._on_call, self._on_compile = on_call, on_compile
        self._schedule = Schedule(
            release,
            open_groups,
            drop_partial=partial_groups == "drop",
            rewards=estimator is not None,
            held=held,
            rows_per_call=rows_per_call,
        )
        self._ledger = Ledger()
        self._structure: Structure | None = None
        self._replicas: list[Replica] = []
        self._centres: dict[Hashable, float] = {}
        self._open: set[int] = set()
        self._open_max = 0
        self._compiles = 0
        self._program = (surrogate, _signature(self._params), _signature(frozen))
        self._thread = threading.get_ident()
        self._finished = False

    def open_group(self, group: Hashable, members: int) -> None:
        """Announces a group: the `members` trajectories of one prompt."""
        self._check_thread()
        self._schedule.open_group(group, members)

    def sample(
        self,
        group: Hashable,
        member: int,
        sample: Tree,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """Adds a sample to a member; `complete` says that it was the last.

        Args:
          group: As in `open_group`.
          member: Index from 0.
          sample: A pytree of arrays for the surrogate, or a `Padded` one.
          tokens: Its trained tokens, for the denominator "tokens" and the report.
          policy_version: The version that sampled it.

        Raises:
          ValueError: It cannot be used; nothing has changed.
        """
        self._check_thread()
        record = self._record(sample, tokens, group, member)
        self._check_version(policy_version, group, member)
        item = self._schedule.sample(group, member, _signature(record.tree))
        self._version = policy_version if self._version is None else self._version
        self._ledger.samples[item[:3]] = record

    def complete(
        self,
        group: Hashable,
        member: int,
        sample: Tree = None,
        *,
        tokens: int | None = None,
        policy_version: int | None = None,
    ) -> None:
        """All tokens of a member are final; `sample` adds its last or only sample."""
        if sample is not None:
            self.sample(
                group, member, sample, tokens=tokens, policy_version=policy_version
            )
        else:
            self._check_thread()
            self._check_version(policy_version, group, member)
        self._settle(self._schedule.complete(group, member))

    def reward(self, group: Hashable, member: int, reward: float) -> None:
        """The verdict on a member is in, before or after `complete`.

        Raises:
          ValueError: It is not a finite number (call `fail` for such a member), or the
            stream has no estimator and takes none.
        """
        self._check_thread()
        value = self._check_reward(group, member, reward)
        close = self._schedule.reward(group, member, value)
        self._ledger.rewards[group, member] = value
        self._settle(close)

    def fail(self, group: Hashable, member: int, reason: str) -> None:
        """Withdraws a member that is not settled, with whatever it left.

        Raises:
          StreamError: `partial_groups` is "fail".
        """
        self._check_thread()
        close = self._schedule.fail(group, member)
        self._ledger.failures[group, member] = reason
        self._ledger.rewards.pop((group, member), None)
        if self._partial == "fail":
            raise StreamError(
                f"group {group!r} member {member} failed ({reason}) and partial_groups "
                "is 'fail'; 'drop' or 'keep' would go on without it"
            )
        self._settle(close)

    def advance(self) -> bool:
        """Starts ready work on free replicas. Returns whether any is left waiting."""
        self._check_thread()
        while True:
            loads = [(r.load, i) for i, r in enumerate(self._replicas)]
            load, index = min(loads, default=(IN_FLIGHT, 0))
            if load >= IN_FLIGHT:
                return self._schedule.ready
            call = self._schedule.next_call(index)
            if call is None:
                return False
            self._start(call)

    def finish(self) -> tuple[Tree, Report]:
        """Ends the step.

        Returns:
          The gradient, with the structure, shapes and layout of `params`, in float32
          (float64 for float64 parameters), and the report.

        Raises:
          ValueError: Members are neither settled nor failed; the stream goes on.
          StreamError: A gradient is not finite; names the trajectories.
        """
        self._check_thread()
        outstanding = self._schedule.outstanding()
        if outstanding:
            names = ", ".join(f"{g!r}/{m}" for g, m in outstanding[:8])
            raise ValueError(
                f"{len(outstanding)} members are outstanding (group/member {names}); "
                "complete and reward them, or call fail, before finish"
            )
        self._schedule.flush()
        while self.advance():
            min(self._replicas, key=lambda r: r.load).wait()
        self._finished = True
        ledger = self._ledger
        if not self._replicas:
            self._make_replicas(channels=0)
        denominator = ledger.denominator(self._denominator)
        sums = mesh.join([r.batch for r in self._replicas], self._params)
        gradient, norm = accumulator.finalize(sums, denominator, self._params)
        values = jax.device_get([evaluated for _, evaluated in ledger.calls])
        bad = ledger.not_finite(values)
        if bad:
            names = ", ".join(f"{x.group!r}/{x.member}" for x in bad[:8])
            raise StreamError(
                f"the gradient of group/member {names} is not finite; look at its "
                "tokens, weights and reward, nothing was updated"
            )
        parts = self._structure
        report = ledger.report(
            values,
            denominator,
            metrics=(parts.sums, parts.maxima) if parts else ((), ()),
            waited=self._schedule.waited,
            compiles=self._compiles,
            open_groups_max=self._open_max,
            group_sum_bytes=self._group_sum_bytes(),
            gradient_norm=float(norm),
        )
        return gradient, report

    def _settle(self, close: Close | None) -> None:
        if close is not None:
            self._close(close)
        self.advance()

    def _close(self, close: Close) -> None:
        group, ledger = close.group, self._ledger
        self._open.discard(close.place)
        centre = self._centres.pop(group, 0.0)
        if not close.kept:
            ledger.dropped.add(group)
            for index in close.replicas:
                self._replicas[index].close(close.place, None)
            return
        survivors = self._schedule.survivors(group)
        rewards = [r for r in survivors.values() if r is not None]
        if len(set(rewards)) == 1:
            ledger.uniform.add(group)
        advantages = self._estimator.advantages(rewards) if rewards else ()
        ledger.advantages[group] = dict.fromkeys(survivors, 0.0) | dict(
            zip(survivors, map(float, advantages), strict=False)
        )
        if close.replicas:
            coefficients = self._coefficients(rewards, centre)
            for index in close.replicas:
                self._replicas[index].close(close.place, coefficients)
        parts = self._structure
        if parts and not (parts.additive or parts.sums or parts.maxima):
            zero = {m for m, a in ledger.advantages[group].items() if a == 0}
            ledger.counts["skipped"] += self._schedule.discard(group, zero)

    def _coefficients(self, rewards, centre) -> np.ndarray:
        """What the sums of a closing group are multiplied by, float32[S]."""
        numbers = []
        if self._structure.weighted:
            scale, offset = self._estimator.coefficients(rewards, centre)
            numbers += [offset, scale]
        if self._holds_additive:
            numbers.append(1.0)
        return np.array(numbers, np.float32)

    def _start(self, call: Call) -> None:
        ledger, parts = self._ledger, self._structure
        replica = self._replicas[call.replica]
        trees = [ledger.samples[item[:3]].tree for item in call.items]
        split = call.place is not None and parts.weighted and parts.additive
        self._announce(call, split)
        if call.place is None:
            weights = np.zeros((call.rows, 2), np.float32)
            for row, item in enumerate(call.items):
                advantages = ledger.advantages.get(item.group, {})
                weights[row] = advantages.get(item.member, 0.0), 1.0
            trees += trees[:1] * (call.rows - len(trees))
            evaluated = replica.direct(trees, weights)
        else:
            self._open.add(call.place)
            self._open_max = max(self._open_max, len(self._open))
            weights = self._hold_weights(call.items[0])
            add_now = split and not self._holds_additive
            evaluated = replica.hold(trees[0], call.place, weights, add_now)
        ledger.record_call(call, evaluated)
        if self._on_call:
            self._on_call(call, evaluated.finite)

    def _hold_weights(self, item) -> np.ndarray:
        """float32[S, N]: what each sum of a group takes of each gradient of a call."""
        rows = []
        if self._structure.weighted:
            reward = self._ledger.rewards[item.group, item.member]
            centre = self._centres.setdefault(item.group, reward)
            rows += [[1.0, 0.0], [reward - centre, 0.0]]
        if self._holds_additive:
            rows.append([0.0, 1.0])
        weights = np.array(rows, np.float32)
        return weights[:, weights.any(axis=0)]  # no column for a part that is not held

    @property
    def _holds_additive(self) -> bool:
        return self._structure.additive and self._partial == "drop"

    def _record(self, sample, tokens, group, member) -> SampleRecord:
        if self._denominator == "tokens" and tokens is None:
            raise ValueError(
                f"group {group!r} member {member}: tokens is missing and the denominator "
                "is 'tokens'; say how many trained tokens the sample has"
            )
        if tokens is not None and tokens < 0:
            raise ValueError(
                f"group {group!r} member {member}: tokens is {tokens}; expected >= 0"
            )
        padded = sample if isinstance(sample, Padded) else Padded(sample, 1, 1)
        tree = jax.tree.map(_strongly_typed, padded.tree)
        self._examine(tree)
        return SampleRecord(tree, tokens or 0, padded.real_tokens, padded.padded_tokens)

    def _examine(self, tree) -> None:
        """Looks at the surrogate's parts once per shape signature."""
        key = (*self._program, _signature(tree))
        if key not in _STRUCTURES:
            _STRUCTURES[key] = structure(
                self._surrogate, self._params, self._frozen, tree
            )
        found = _STRUCTURES[key]
        if found.weighted and self._estimator is None:
            raise ValueError(
                "the surrogate has a `weighted` part and estimator is None; return it as "
                "`additive`, or give an estimator and rewards"
            )
        if self._structure is None:
            self._structure = found
            channels = 2 * found.weighted + self._holds_additive
            self._make_replicas(channels)
        elif found != self._structure:
            raise ValueError(
                f"the surrogate has parts {found} for this sample and had "
                f"{self._structure} before; every sample must have the same parts"
            )

    def _make_replicas(self, channels: int) -> None:
        params = mesh.split(self._params)
        frozen = [None] * len(params)
        if self._frozen is not None:
            frozen = mesh.split(self._frozen)
            frozen = frozen * len(params) if len(frozen) == 1 else frozen
        self._replicas = [
            Replica(self._surrogate, p, f, channels)
            for p, f in zip(params, frozen, strict=True)
        ]
        self._channels = channels

    def _group_sum_bytes(self) -> int:
        one = accumulator.bytes_per_device(self._params, self._channels, 1)
        none = accumulator.bytes_per_device(self._params, self._channels, 0)
        return (one - none) * self._open_max

    def _announce(self, call: Call, split: bool) -> None:
        program = (*self._program, split, call.rows, call.replica, call.items[0].bucket)
        if program in _PROGRAMS:
            return
        _PROGRAMS.add(program)
        self._compiles += 1
        if self._on_compile:
            shapes = ", ".join(str(shape) for shape, _ in call.items[0].bucket[1])
            self._on_compile(f"gradient of {call.rows} x {shapes}")

    def _check_reward(self, group, member, reward) -> float:
        where = f"group {group!r} member {member}"
        if self._estimator is None:
            raise ValueError(
                f"{where} got reward {reward!r} and estimator is None, which has no use "
                "for rewards; leave it out or give an estimator"
            )
        try:
            value = float(reward)
        except (TypeError, ValueError):
            value = math.nan
        if not abs(value) < 1e30:  # float32 sums need room above it
            raise ValueError(
                f"{where} got reward {reward!r}; expected a finite number below 1e30. "
                "Call fail(..., reason='invalid_reward') for a missing verdict"
            )
        return value

    def _check_version(self, version, group, member) -> None:
        if version is not None and self._version not in (None, version):
            raise ValueError(
                f"group {group!r} member {member} was sampled by policy version "
                f"{version} and this step is of version {self._version}; a step takes "
                "trajectories of its own parameters only"
            )

    def _check_thread(self) -> None:
        if threading.get_ident() != self._thread:
            raise ValueError(
                f"called from thread {threading.current_thread().name!r}; the thread "
                "that made a GradientStream owns it, pass events to it in a queue"
            )
        if self._finished:
            raise ValueError("this stream is finished; make a new one for every step")


def _check_settings(denominator, release, partial_groups, rows_per_call) -> None:
    choices = [
        ("release", release, get_args(Release)),
        ("partial_groups", partial_groups, get_args(PartialGroups)),
    ]
    if isinstance(denominator, str):
        kinds = ("none", "groups", "trajectories", "tokens")
        choices.append(("denominator", denominator, kinds))
    elif not (math.isfinite(denominator) and denominator > 0):
        raise ValueError(f"denominator is {denominator!r}; expected a number above 0")
    for name, value, allowed in choices:
        if value not in allowed:
            expected = ", ".join(map(repr, allowed))
            raise ValueError(f"{name} is {value!r}; expected one of {expected}")
    if rows_per_call < 1:
        raise ValueError(f"rows_per_call is {rows_per_call}; expected >= 1")


def _parameter(x: Any) -> jax.Array:
    x = _on_device(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(
            f"a parameter of shape {x.shape} has dtype {x.dtype}, which has no gradient; "
            "pass it in `frozen`"
        )
    return x


def _on_device(x: Any) -> jax.Array:
    x = _strongly_typed(x)
    return x if isinstance(x, jax.Array) else jnp.asarray(x)


def _strongly_typed(x: Any) -> Any:
    """One dtype per kind of number, so that 0.1 and float32(0.1) share a program."""
    if isinstance(x, jax.Array):
        return jnp.asarray(x, x.dtype) if x.weak_type else x
    x = np.asarray(x)
    return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _signature(tree: Tree) -> Hashable:
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, tuple((x.shape, x.dtype) for x in leaves)
