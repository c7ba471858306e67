"""A toy model in pieces, and the same as a whole, written twice.

    h_t = tanh(W x_t + U h_{t-1})    k_t = K h_t    v_t = V h_t + sum_{r < t} tanh(k_r)
    s_t = c . h_{t-1} + sum_{r < t} tanh(k_r . h_{t-1}) v_r . h_{t-1}

    weighted = sum_t u_t s_t             additive = sum_t a_t sin(s_t)

As in a transformer, what is before a token predicts it, and what is kept of a token has
a gradient to what is kept of earlier ones. Unlike there, the hidden vector has one too.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from thundersync_jax import Surrogate
from thundersync_jax.stream.padding import Padded
from thundersync_jax.stream.segments import Segments, State

WIDTH, PIECE, SLOTS = 2, 4, 18
GARBAGE = 3.0  # what padding leaves


def params(dtype=np.float64):
    rng = np.random.default_rng(5)
    names = dict.fromkeys("WUKV", (WIDTH, WIDTH)) | {"c": (WIDTH,)}
    return {n: jnp.asarray(0.6 * rng.normal(size=s), dtype) for n, s in names.items()}


def empty(slots, dtype=None):
    rows = jnp.zeros((slots, WIDTH), dtype)
    return State({"keys": rows, "values": rows}, jnp.zeros(WIDTH, dtype))


def hidden(p, x, first):
    """h of every token."""

    def step(h, x_t):
        h = jnp.tanh(p["W"] @ x_t + p["U"] @ h)
        return h, h

    return jax.lax.scan(step, first, x)[1]


def surrogate(parts, sample, scores):
    weighted = jnp.sum(sample["u"] * scores)
    additive = jnp.sum(sample["a"] * jnp.sin(scores))
    return Surrogate(
        None if parts == "additive" else weighted,
        None if parts == "weighted" else additive,
        {"sum": jax.lax.stop_gradient(weighted + additive)},
    )


@functools.cache
def segments(parts="additive", dtype=np.float64):
    def piece(p, state, sample):
        start, length = sample["start"], sample["length"]
        h = hidden(p, sample["x"], state.last)
        before = jnp.concatenate([state.last[None], h[:-1]])
        real = (jnp.arange(len(h)) < length)[:, None]
        own = {name: h @ p[name[0].upper()].T for name in ("keys", "values")}
        squashed = jnp.tanh(own["keys"])
        there = len(state.kept["keys"])
        seen = jnp.arange(there) < start
        behind = jnp.where(seen[:, None], jnp.tanh(state.kept["keys"]), 0.0)
        sums = jnp.sum(behind, axis=0, keepdims=True) + jnp.cumsum(squashed, axis=0)
        own["values"] += sums - squashed
        all_of = {name: jnp.concatenate([state.kept[name], own[name]]) for name in own}
        among = jnp.tril(jnp.ones((len(h), len(h)), bool), -1)
        visible = jnp.concatenate(
            [jnp.broadcast_to(seen[None], (len(h), there)), among], axis=1
        )
        strength = jnp.tanh(before @ all_of["keys"].T) * (before @ all_of["values"].T)
        scores = before @ p["c"] + jnp.sum(jnp.where(visible, strength, 0.0), axis=1)
        own = {name: jnp.where(real, x, GARBAGE) for name, x in own.items()}
        last = jax.lax.dynamic_index_in_dim(h, length - 1, keepdims=False)
        return surrogate(parts, sample, scores), State(own, last)

    return Segments(piece, functools.partial(empty, dtype=dtype), SLOTS)


@functools.cache
def whole(parts="additive"):
    """The surrogate of whole trajectories, one token after another."""

    def function(p, sample):
        count = len(sample["x"])
        rows = jnp.zeros((count, WIDTH), sample["x"].dtype)

        def step(carry, t):
            h, keys, values = carry
            earlier = jnp.arange(count) < t
            strength = jnp.tanh(keys @ h) * (values @ h)
            score = p["c"] @ h + jnp.sum(jnp.where(earlier, strength, 0.0))
            h = jnp.tanh(p["W"] @ sample["x"][t] + p["U"] @ h)
            behind = jnp.where(earlier[:, None], jnp.tanh(keys), 0.0)
            values = values.at[t].set(p["V"] @ h + jnp.sum(behind, axis=0))
            keys = keys.at[t].set(p["K"] @ h)
            return (h, keys, values), score

        nothing = jnp.zeros(WIDTH, sample["x"].dtype), rows, rows
        scores = jax.lax.scan(step, nothing, jnp.arange(count))[1]
        return surrogate(parts, sample, scores)

    return function


def trajectory(key, tokens, trained, prompt=0, dtype=np.float64):
    """Arrays of one; the first `prompt` tokens follow from key[0] alone."""
    rng, shared = np.random.default_rng(key), np.random.default_rng(key[0])
    x = rng.normal(size=(tokens, WIDTH))
    x[:prompt] = shared.normal(size=(prompt, WIDTH))
    u, a = rng.normal(size=(2, tokens)) * np.asarray(trained)
    return {name: y.astype(dtype) for name, y in {"x": x, "u": u, "a": a}.items()}


def cut(one, start, end, length=PIECE):
    """The tokens from `start` to `end` as a sample of the segments."""
    arrays = {}
    for name, x in one.items():
        arrays[name] = np.zeros((length, *x.shape[1:]), x.dtype)
        arrays[name][: end - start] = x[start:end]
    arrays["x"][end - start :] = GARBAGE
    place = {"start": np.int32(start), "length": np.int32(end - start)}
    return Padded(arrays | place, end - start, length)


def stretch(one):
    """All tokens as a sample of the whole."""
    return cut(one, 0, len(one["x"]), SLOTS)


@functools.cache
def _sum_gradient(parts):
    function = whole(parts)

    def loss(p, samples, weights):
        found = jax.vmap(function, (None, 0))(p, samples)
        rows = [y for y in found[:2] if y is not None]
        return sum(jnp.sum(w * y) for w, y in zip(weights, rows, strict=True))

    return jax.jit(jax.value_and_grad(loss))


def oracle(p, ones, weights, denominator=1.0, parts="additive", most=16):
    """The loss of whole trajectories and its gradient, by jax.grad of all at once.

    Args:
      p: The parameters.
      ones: Trajectories, fewer than `most`.
      weights: One list per part.
      denominator: Z.
    """
    blank = {name: np.zeros_like(x[:1]) for name, x in trajectory((0,), 1, 0).items()}
    padded = [stretch(one).tree for one in [*ones, *[blank] * (most - len(ones))]]
    trees = [{name: tree[name] for name in "xua"} for tree in padded]
    samples = jax.tree.map(lambda *xs: np.stack(xs), *trees)
    rows = np.zeros((len(weights), most))
    rows[:, : len(ones)] = weights
    loss, gradient = _sum_gradient(parts)(p, samples, tuple(rows / denominator))
    return float(loss), gradient


def gap(found, expected):
    """The largest difference of two trees, over the largest expected entry."""
    leaves = [[np.asarray(x) for x in jax.tree.leaves(t)] for t in (found, expected)]
    size = max(float(np.max(np.abs(y))) for y in leaves[1])
    gaps = [np.max(np.abs(x - y)) for x, y in zip(*leaves, strict=True)]
    return float(max(gaps)) / (size or 1.0)
