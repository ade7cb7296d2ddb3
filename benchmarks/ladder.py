"""The figures of ladder.py that are made beforehand: writes cases/ladder.json.

    uv run --extra tpu-compiler python benchmarks/ladder.py [attention mlp patches messages]

Needs libtpu, the extra tpu-compiler, and no TPU; takes some minutes. Run it when a level of ladder.py changes. The
levels are named as in the notebook; `PARTS` there says which the closing cell shows.
"""

import dataclasses
import functools
import importlib.metadata
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from measured import notebook, shape

from pallas_puzzles.course import curriculum
from pallas_puzzles.speed.levels import compare
from pallas_puzzles.speed.work import OpByOp

BF16 = jnp.bfloat16
Levels = dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]


def attention(nb: types.SimpleNamespace) -> Levels:
    args = (shape(8, 4096, 128),) * 3
    levels = {
        "1 op by op": OpByOp(nb.attention),
        "2 jit": nb.attention,
        "3 chunks of 512": functools.partial(nb.chunked_attention, c=512),
        "4 tiles of 128 x 128": functools.partial(nb.flash, bq=128, bkv=128),
        "5 tiles of 1024 x 1024": functools.partial(nb.flash, bq=1024, bkv=1024),
        "5 tiles of 2048 x 1024": functools.partial(nb.flash, bq=2048, bkv=1024),
    }
    return {name: (fn, args) for name, fn in levels.items()}


def mlp(nb: types.SimpleNamespace) -> Levels:
    args = (shape(4096, 1024), shape(1, 1024, dtype=jnp.float32), shape(1024, 4096), shape(4096, 1024))
    levels = {
        "1 op by op": OpByOp(nb.mlp_spec),
        "2 jit": nb.mlp_spec,
        "3 norm folded": nb.folded_mlp,
        "4 rows of 128": functools.partial(nb.fused_mlp, bm=128, bf=256),
        "5 rows of 1024": functools.partial(nb.fused_mlp, bm=1024, bf=512),
    }
    return {name: (fn, args) for name, fn in levels.items()}


def patches(nb: types.SimpleNamespace) -> Levels:
    images = (shape(64, 224, 224, 3), shape(16, 16, 3, 768))
    cut = (shape(64 * 196, 768), shape(768, 768), shape(1, 768, dtype=jnp.float32))
    return {
        "1 op by op": (OpByOp(nb.patches_as_product), images),
        "2 jit, convolution": (nb.patches_spec, images),
        "3 cut, product": (nb.patches_as_product, images),
        "cut before, jit": (nb.embed_spec, cut),
        "4 cut before, 56 rows": (functools.partial(nb.embed_patches, bm=56), cut),
        "5 cut before, 896 rows": (functools.partial(nb.embed_patches, bm=896), cut),
    }


def scattered(x: Any, src: Any, dst: Any) -> Any:
    return jnp.zeros(x.shape, jnp.float32).at[dst].add(x[src].astype(jnp.float32)).astype(x.dtype)


def dense(a: Any, x: Any) -> Any:
    return jnp.dot(a, x, preferred_element_type=jnp.float32).astype(x.dtype)


def messages(nb: types.SimpleNamespace) -> Levels:
    nodes, edges = shape(8192, 128), (shape(131_072, dtype=jnp.int32),) * 2
    sparse = {b: (*nb.clustered(8192, b), b) for b in (128, 512)}
    blocks = {b: (rows, cols, shape(len(rows), b, b), nodes) for b, (rows, cols, _) in sparse.items()}
    return {
        "1 op by op": (OpByOp(scattered), (nodes, *edges)),
        "2 jit, scatter": (scattered, (nodes, *edges)),
        "3 dense product": (dense, (shape(8192, 8192), nodes)),
        "4 blocks of 128": (nb.messages, blocks[128]),
        "5 blocks of 512": (nb.messages, blocks[512]),
    }


def main() -> None:
    file = curriculum.course_folder() / "cases" / "ladder.json"
    told = json.loads(file.read_text("utf-8")) if file.is_file() else {"figures": {}}
    told["conditions"] = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    nb, parts = notebook("ladder"), {each.__name__: each for each in (attention, mlp, patches, messages)}
    for part in sys.argv[1:] or parts:
        rows = []
        for name, (fn, args) in parts[part](nb).items():
            found = compare({name: fn}, *args)
            rows += [row for row in found.rows if row.kind == "estimate"]
            print(found, flush=True)
        told["figures"][part] = [dataclasses.asdict(row) for row in rows]
        file.write_text(json.dumps(told, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
