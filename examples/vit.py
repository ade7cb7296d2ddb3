"""A vision transformer, ViT-B/16, on the kernels of ladder.py as a library.

    uv run python examples/vit.py [--figures]

The kernels are yours where the puzzles of ladder.py are solved in your notebooks, and the course's elsewhere. It says
which. It runs a small model, and compares its result with plain jnp. --figures: what a layer of ViT-B/16 costs for 8
images of 256 x 256 pixels, in plain jnp and with the kernels, by the TPU compiler, without a TPU.

Images are cut into patches on the host, where a data loader would do it. Attention and the MLP of all layers work on
matrices of B * T rows, so no kernel knows of images.
"""

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_puzzles import compare, setup, solved_function

BF16 = jnp.bfloat16
PATCH = 16  # pixels
PARTS = {"embed_patches": "ladder/9", "flash": "ladder/4", "fused_mlp": "ladder/7"}


def kernels() -> SimpleNamespace:
    """The three kernels: the reader's where they are solved, or the course's. Says which."""
    from pallas_puzzles.course import cases

    own = {name: solved_function(puzzle, name) for name, puzzle in PARTS.items()}
    for name, fn in own.items():
        print(f"{name}: {'yours' if fn else f'the course{chr(39)}s; yours is {PARTS[name]}'}")
    found = {name: fn or cases.official(PARTS[name]).fn for name, fn in own.items()}
    return SimpleNamespace(
        embed=lambda patches, w, bias: found["embed_patches"](patches, w, bias, bm=min(512, len(patches))),
        attend=lambda q, k, v: found["flash"](q, k, v, bq=q.shape[1], bkv=q.shape[1]),
        mlp=lambda x, g, w1, w2: found["fused_mlp"](x, g, w1, w2, bm=min(1024, len(x)), bf=min(512, w1.shape[1])),
    )


def plain() -> SimpleNamespace:
    """The same three parts in plain jnp."""
    from pallas_puzzles.course import cases

    specs = {name: cases.official(puzzle).spec for name, puzzle in PARTS.items()}
    return SimpleNamespace(embed=specs["embed_patches"], attend=specs["flash"], mlp=specs["fused_mlp"])


def cut(images: np.ndarray) -> np.ndarray:
    """(B, H, W, C) -> (B * N, PATCH * PATCH * C), row by row: what a data loader does."""
    B, H, W, C = images.shape
    pieces = images.reshape(B, H // PATCH, PATCH, W // PATCH, PATCH, C).transpose(0, 1, 3, 2, 4, 5)
    return pieces.reshape(-1, PATCH * PATCH * C)


def rms_norm(x: Any, g: Any) -> Any:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt((y * y).mean(axis=1, keepdims=True) + 1e-6) * g).astype(x.dtype)


def layer(x: Any, weights: dict[str, Any], parts: Any, B: int, heads: int) -> Any:
    """One layer, pre-norm. x: (B * T, C)."""
    C = x.shape[1]
    qkv = jnp.dot(rms_norm(x, weights["g1"]), weights["qkv"], preferred_element_type=jnp.float32).astype(x.dtype)
    qkv = qkv.reshape(B, -1, 3, heads, C // heads).transpose(2, 0, 3, 1, 4)  # (3, B, heads, T, D)
    q, k, v = qkv.reshape(3, B * heads, -1, C // heads)
    out = parts.attend(q, k, v).reshape(B, heads, -1, C // heads).swapaxes(1, 2).reshape(x.shape)
    x = x + jnp.dot(out, weights["out"], preferred_element_type=jnp.float32).astype(x.dtype)
    return parts.mlp(x, weights["g2"], weights["w1"], weights["w2"])


def vit(patches: Any, model: dict[str, Any], parts: Any, B: int, heads: int) -> Any:
    """Scores of the classes, (B, classes), float32. patches: (B * T, K)."""
    x = parts.embed(patches, model["embed"], model["bias"])
    x = (x.reshape(B, -1, x.shape[1]) + model["place"]).reshape(x.shape)
    for weights in model["layers"]:
        x = layer(x, weights, parts, B, heads)
    pooled = x.reshape(B, -1, x.shape[1]).astype(jnp.float32).mean(axis=1)
    return jnp.dot(pooled, model["head"])


def new_model(C: int, F: int, layers: int, T: int, K: int, classes: int = 10) -> dict[str, Any]:
    """Random weights, bfloat16; factors of norms and biases are float32."""
    rng = np.random.default_rng(0)

    def weights(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape) * shape[0] ** -0.5, BF16)

    one = jnp.ones((1, C))

    def new_layer() -> dict[str, Any]:
        square = {"qkv": weights(C, 3 * C), "out": weights(C, C)}
        return {"g1": one, "g2": one, **square, "w1": weights(C, F), "w2": weights(F, C)}

    return {
        "embed": weights(K, C),
        "bias": jnp.zeros((1, C)),
        "place": weights(T, C),
        "layers": [new_layer() for _ in range(layers)],
        "head": weights(C, classes).astype(jnp.float32),
    }


def difference(parts: Any) -> float:
    """The largest difference of a score from plain jnp, relative to the largest score: 2 images, 2 layers."""
    B, heads, C = 2, 2, 128
    images = np.random.default_rng(1).standard_normal((B, 64, 128, 3)).astype(BF16)
    patches = cut(images)
    model = new_model(C, 256, layers=2, T=len(patches) // B, K=patches.shape[1])
    got, want = (np.asarray(vit(patches, model, each, B, heads)) for each in (parts, plain()))
    return float(np.abs(got - want).max() / np.abs(want).max())


def figures(parts: Any) -> Any:
    """A layer of ViT-B/16 for 8 images of 256 x 256: 2048 rows of 768, 12 heads."""
    B, C, F, heads = 8, 768, 3072, 12

    def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    one = shape(1, C, dtype=jnp.float32)
    weights = {"g1": one, "g2": one, "qkv": shape(C, 3 * C), "out": shape(C, C), "w1": shape(C, F), "w2": shape(F, C)}
    levels = {"jit": plain(), "kernels": parts}
    fns = {name: lambda x, weights, each=each: layer(x, weights, each, B, heads) for name, each in levels.items()}
    return compare(fns, shape(B * (256 // PATCH) ** 2, C), weights)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--figures", action="store_true", help="what a layer of ViT-B/16 costs on a TPU")
    asked = parser.parse_args(arguments)
    setup()
    parts = kernels()
    print(f"2 layers, 2 images: the scores differ from plain jnp by {difference(parts):.1%} of the largest")
    if asked.figures:
        figures(parts)


if __name__ == "__main__":
    main()
