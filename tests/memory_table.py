"""What training takes in memory per model size, as the table of the README has it.

    python tests/memory_table.py

In bytes per trained parameter: float32 parameters (4) and Adam's two moments (8), the
batch's gradient sum (4), one gradient (4), and F0 and F1 (8) for each open group; exact
sums take three times as much, and one more. All of it is divided by fsdp x tensor.
Activations, the sampler's copy of the weights and its keys and values come on top.
"""

import functools

import jax

from thundersync_jax.config import ModelConfig
from thundersync_jax.models import transformer
from thundersync_jax.stream import sums

# Shapes of Qwen3: layers, width, hidden units, query heads, whether the head is tied.
SHAPES = {
    "0.6B": (28, 1024, 3072, 16, True),
    "1.7B": (28, 2048, 6144, 16, True),
    "4B": (36, 2560, 9728, 32, True),
    "8B": (36, 4096, 12288, 32, False),
    "14B": (40, 5120, 17408, 40, False),
    "32B": (64, 5120, 25600, 64, False),
}
HEADER = """\
| Qwen3 | parameters | batch, group | trajectory, 1 open group | 4 | 4, exact sums |
|---|---|---|---|---|---|"""
STATE = 4 + 8 + 4  # bytes per parameter: weights, moments, a gradient


def parameters(layers: int, width: int, hidden: int, heads: int, tied: bool) -> int:
    """How many parameters a shape has."""
    model = ModelConfig(
        vocab_size=151_936,
        layers=layers,
        width=width,
        mlp_width=hidden,
        heads=heads,
        kv_heads=8,
        head_dim=128,
        qk_norm=True,
        tied_embeddings=tied,
    )
    make = functools.partial(transformer.init, model)
    params = jax.eval_shape(make, jax.random.key(0))
    return sum(x.size for x in jax.tree.leaves(params))


def bytes_per_parameter(open_groups: int, exact: bool = False) -> int:
    """Of a group advantage without additive terms."""
    held = sums.channels("group", weighted=True, additive=False, lossy=True)
    places = 1 + held * open_groups + exact  # the batch, open groups, complete ones
    return STATE + 4 * places * (3 if exact else 1)


def table() -> str:
    """The rows, in GiB over all devices of a replica."""
    rows = [HEADER]
    kinds = [(0, False), (1, False), (4, False), (4, True)]
    for name, shape in SHAPES.items():
        count = parameters(*shape)
        sizes = [count * bytes_per_parameter(*kind) / 2**30 for kind in kinds]
        cells = " | ".join(f"{size:,.0f} GiB" for size in sizes)
        rows.append(f"| {name} | {count / 1e9:.2f}e9 | {cells} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
