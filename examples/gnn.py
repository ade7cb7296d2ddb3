"""A graph convolution on the block-sparse kernel of ladder.py as a library.

    uv run python examples/gnn.py [--figures]

The kernel is yours where ladder/10 is solved in your notebooks, and the course's elsewhere. It says which. It runs two
layers on a small graph, and compares the result with a scatter. --figures: what a layer costs for 8192 nodes, 131,072
edges and 128 features, with a scatter, a dense matrix and the kernel, by the TPU compiler, without a TPU.

A layer is relu(A @ (x @ w)), where A is the adjacency matrix with self-loops, each entry divided by the square roots of
both degrees (Kipf and Welling, 2017). The lists of blocks are made once for a graph, on the host.
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles import compare, op_by_op, setup, solved_function

BF16 = jnp.bfloat16
PUZZLE = "ladder/10"


def kernel() -> Callable[..., Any]:
    """`messages` of ladder.py: the reader's where it is solved, or the course's. Says which."""
    from pallas_puzzles.course import cases

    own = solved_function(PUZZLE, "messages")
    print(f"messages: {'yours' if own else f'the course{chr(39)}s; yours is {PUZZLE}'}")
    return own or cases.official(PUZZLE).fn


def new_graph(nodes: int, edges: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
    """(src, dst) of random edges between nodes whose numbers are less than `reach` apart, as after a clustering."""
    rng = np.random.default_rng(0)
    dst = rng.integers(0, nodes, edges)
    src = np.clip(dst + rng.integers(1 - reach, reach, edges), 0, nodes - 1)
    return src.astype(np.int32), dst.astype(np.int32)


def with_weights(src: np.ndarray, dst: np.ndarray, nodes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(src, dst, weight) of every entry of the normalised adjacency matrix: each edge once, and self-loops."""
    itself = np.arange(nodes, dtype=np.int32)
    places = np.unique(np.stack([np.r_[dst, itself], np.r_[src, itself]], axis=1), axis=0)
    dst, src = places.T.astype(np.int32)
    inside, outside = np.bincount(dst, minlength=nodes), np.bincount(src, minlength=nodes)
    return src, dst, (inside[dst] * outside[src]).astype(np.float32) ** -0.5


def block_lists(
    src: np.ndarray, dst: np.ndarray, weight: np.ndarray, nodes: int, b: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(rows, cols, blocks) as `messages` takes them; self-loops see to it that each row of blocks has one.

    Raises ValueError where b does not divide the number of nodes.
    """
    if nodes % b:
        raise ValueError(f"{nodes} nodes are no whole number of blocks of {b}: add nodes without edges")
    number = (dst // b) * (nodes // b) + src // b
    live, place = np.unique(number, return_inverse=True)  # in order of rows
    blocks = np.zeros((len(live), b, b), np.float32)
    blocks[place, dst % b, src % b] = weight
    rows, cols = np.divmod(live, nodes // b)
    return rows.astype(np.int32), cols.astype(np.int32), blocks.astype(BF16)


def with_kernel(messages: Callable[..., Any]) -> Callable[..., Any]:
    def layer(x: Any, w: Any, rows: Any, cols: Any, blocks: Any) -> Any:
        h = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
        return jax.nn.relu(messages(rows, cols, blocks, h))

    return layer


def with_scatter(x: Any, w: Any, src: Any, dst: Any, weight: Any) -> Any:
    h = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return jax.nn.relu(jnp.zeros_like(h).at[dst].add(h[src] * weight[:, None])).astype(x.dtype)


def with_matrix(x: Any, w: Any, a: Any) -> Any:
    h = jnp.dot(x, w, preferred_element_type=jnp.float32).astype(x.dtype)
    return jax.nn.relu(jnp.dot(a, h, preferred_element_type=jnp.float32).astype(x.dtype))


def difference(messages: Callable[..., Any]) -> float:
    """The largest difference from a scatter after two layers, relative to the largest value: 512 nodes."""
    nodes, D, b = 512, 128, 128
    entries = with_weights(*new_graph(nodes, 4096, reach=100), nodes)
    rng = np.random.default_rng(1)
    x = rng.standard_normal((nodes, D)).astype(BF16)
    weights = [(rng.standard_normal((D, D)) * D**-0.5).astype(BF16) for _ in range(2)]
    lists, layer = block_lists(*entries, nodes, b), with_kernel(messages)
    got = want = jnp.asarray(x)
    for w in weights:
        got, want = layer(got, w, *lists), with_scatter(want, w, *entries)
    error = np.abs(np.asarray(got, np.float32) - np.asarray(want, np.float32)).max()
    return float(error / np.abs(np.asarray(want, np.float32)).max())


def figures(messages: Callable[..., Any]) -> list[Any]:
    """A layer for 8192 nodes, 131,072 edges, 128 features: a table for each way to hold the graph."""
    nodes, D = 8192, 128
    src, dst, weight = with_weights(*new_graph(nodes, 131_072, reach=256), nodes)
    x, w = jax.ShapeDtypeStruct((nodes, D), BF16), jax.ShapeDtypeStruct((D, D), BF16)
    entries = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in (src, dst, weight)]
    tables = [
        compare({"op by op, scatter": op_by_op(with_scatter), "jit, scatter": with_scatter}, x, w, *entries),
        compare({"jit, dense matrix": with_matrix}, x, w, jax.ShapeDtypeStruct((nodes, nodes), BF16)),
    ]
    for b in (128, 512):
        rows, cols, blocks = block_lists(src, dst, weight, nodes, b)
        args = rows, cols, jax.ShapeDtypeStruct(blocks.shape, blocks.dtype)
        tables.append(compare({f"kernel, {len(rows)} blocks of {b}": with_kernel(messages)}, x, w, *args))
    return tables


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", action="store_true", help="what a layer of a large graph costs on a TPU")
    asked = parser.parse_args(arguments)
    setup()
    messages = kernel()
    print(f"2 layers, 512 nodes: the result differs from a scatter's by {difference(messages):.1%} of the largest")
    if asked.figures:
        figures(messages)


if __name__ == "__main__":
    main()
