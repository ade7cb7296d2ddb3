"""A transformer that learns to sort letters, built on the kernels of capstone.py as a library.

    uv run python examples/transformer.py [--steps 300] [--experts 4] [--plain]

Run it in the folder of your notebooks: the kernels are yours where the puzzles of capstone.py are solved there, and the
course's elsewhere. It says which. --experts: a mixture of experts in the second block. --plain: the same in plain jnp
first, to compare. On a TPU everything runs compiled; elsewhere XLA runs the kernels' programs (`fast_execution`).
"""

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from pallas_puzzles import Curve, fast_execution, own_kernels, setup

LETTERS, LENGTH = "abcdefghijklmnop", 8
VOCAB, TOKENS = len(LETTERS) + 1, 2 * LENGTH  # the letters and a `>`; what the model reads of one problem
C, D, HEADS = 128, 64, {"H": 2, "Hkv": 1}  # width of the stream and of a head; heads of queries, and of keys


def kernels() -> Any:
    """The parts of the capstone: arrays in, arrays out, blocks chosen inside, gradients by jax.grad."""

    def floats(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    x, one, labels = floats(32, C), floats(1, C), jax.ShapeDtypeStruct((32, 1), jnp.int32)
    first = (x, one, one, floats(C, 8 * D), floats(4 * D, C), one, one)
    state = (floats(256, 128),) * 4
    return own_kernels(
        linear=("capstone/1", x, floats(C, VOCAB)),
        norm=("capstone/1", x, one, one),
        row_losses=("capstone/2", floats(32, VOCAB), labels, floats(32, 1), 32),
        block_of=("capstone/4", *first, floats(C, 4 * C), floats(4 * C, C)),
        adam=("capstone/5", *state, jax.ShapeDtypeStruct((), jnp.int32)),
        moe_block_of=("capstone/6", *first, floats(C, 4), floats(4, C, 2 * C), floats(4, 2 * C, C)),
    )


def plain() -> Any:
    """The same parts in plain jnp: the specs of the notebook."""
    from pallas_puzzles.course import cases

    nb = cases.official("capstone/1").fn.__globals__
    names = {"linear": "linear_spec", "norm": "norm_spec", "block_of": "block_spec", "moe_block_of": "moe_block_spec"}
    losses = nb["loss_spec"]
    parts = {name: nb[spec] for name, spec in names.items()}
    return SimpleNamespace(
        **parts, adam=nb["adam_spec"], row_losses=lambda x, labels, weights, bm: losses(x, labels, weights)
    )


def problems(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (rows, 16), 8 letters, a `>` and 7 of the 8 in order; and what comes next after each, (rows, 16)."""
    letters = rng.integers(0, len(LETTERS), (rows, LENGTH))
    text = np.concatenate([letters, np.full((rows, 1), VOCAB - 1), np.sort(letters, axis=1)], axis=1).astype(np.int32)
    return text[:, :-1], text[:, 1:]


def new_model(seed: int, experts: int) -> dict[str, Any]:
    """Random weights: a block with an MLP, and a second one, with that many experts where there are any."""
    rng = np.random.default_rng(seed)

    def weights(*shape: int, scale: float | None = None) -> np.ndarray:
        return (rng.standard_normal(shape) * (scale or shape[-2] ** -0.5)).astype(np.float32)

    def new_block(number_of_experts: int) -> list[np.ndarray]:
        one, zero, qkv = np.ones((1, C), np.float32), np.zeros((1, C), np.float32), sum(HEADS.values()) + HEADS["Hkv"]
        half = [one, zero, weights(C, qkv * D), weights(HEADS["H"] * D, C) / 2, one, zero]
        if not number_of_experts:
            return [*half, weights(C, 4 * C), weights(4 * C, C) / 2]
        E = number_of_experts
        return [*half, weights(C, E), weights(E, C, 2 * C), weights(E, 2 * C, C) / 2]

    return {
        "embed": weights(VOCAB, C, scale=0.05),
        "place": weights(TOKENS, C, scale=0.05),
        "blocks": [new_block(0), new_block(experts)],
        "norm": (np.ones((1, C), np.float32), np.zeros((1, C), np.float32)),
        "out": weights(C, VOCAB),
    }


def scores(model: dict[str, Any], tokens: Any, parts: Any) -> tuple[jax.Array, Any]:
    """The scores of what comes next after each token, (B * T, V), and the experts' balance."""
    B, T = tokens.shape
    x, balance = (model["embed"][tokens] + model["place"][:T]).reshape(B * T, C), 0.0
    for weights in model["blocks"]:
        if len(weights) == 8:
            x = parts.block_of(x, *weights, B=B, **HEADS)
        else:
            x, balance = parts.moe_block_of(x, *weights, B=B, **HEADS)
    return parts.linear(parts.norm(x, *model["norm"]), model["out"]), balance


def loss(model: dict[str, Any], tokens: Any, targets: Any, parts: Any) -> jax.Array:
    """The mean loss of the letters of the answers, and a hundredth of the balance."""
    logits, balance = scores(model, tokens, parts)
    answer = jnp.broadcast_to(jnp.arange(TOKENS) >= LENGTH, tokens.shape).reshape(-1, 1).astype(jnp.float32)
    losses = parts.row_losses(logits, targets.reshape(-1, 1), answer, min(len(logits), 512))
    return losses.sum() / answer.sum() + 0.01 * balance


def train(model: dict[str, Any], parts: Any, steps: int, each: Callable[[float], None]) -> dict[str, Any]:
    """The model after so many steps of Adam on 32 problems each. each(loss) is called after every step."""
    flat, unravel = ravel_pytree(model)
    p = jnp.pad(flat, (0, -flat.size % (256 * 128))).reshape(-1, 128)  # one array, for one call of adam

    def model_of(p: jax.Array) -> dict[str, Any]:
        return unravel(p.reshape(-1)[: flat.size])

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(p: Any, m: Any, v: Any, t: Any, tokens: Any, targets: Any) -> tuple[Any, ...]:
        value, g = jax.value_and_grad(lambda p: loss(model_of(p), tokens, targets, parts))(p)
        return *parts.adam(p, m, v, g, t), value

    rng, m, v = np.random.default_rng(0), jnp.zeros_like(p), jnp.zeros_like(p)
    for t in range(1, steps + 1):
        p, m, v, value = step(p, m, v, jnp.int32(t), *problems(rng, 32))
        each(float(value))
    return model_of(p)


def accuracy(model: dict[str, Any], parts: Any) -> float:
    """The share of letters that come next in 32 new problems."""
    tokens, targets = problems(np.random.default_rng(7), 32)
    said = jax.jit(lambda model: scores(model, tokens, parts)[0])(model).argmax(axis=1).reshape(tokens.shape)
    return float(np.mean(np.asarray(said == targets)[:, LENGTH:]))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    options = parser.parse_args(arguments)
    setup()
    yours = kernels()
    print(yours)
    finished: dict[str, list[float]] = {}
    with fast_execution(), jax.default_matmul_precision("highest"):
        for name, parts in [("plain jnp", plain())] * options.plain + [("your kernels", yours)]:
            curve, ends = Curve(options.steps, name, beside=finished), [time.monotonic()]

            def after(value: float, curve: Curve = curve, ends: list[float] = ends) -> None:
                curve(value)
                ends.append(time.monotonic())

            model = train(new_model(0, options.experts), parts, options.steps, after)
            took, right = ends[-1] - ends[0], accuracy(model, parts)
            finished[name] = curve.values
            lost = np.mean(curve.values[-10:])
            each = f"{1e3 * np.median(np.diff(ends)):.1f} ms a step"
            print(f"{name}: {options.steps} steps in {took:.1f} s with compiling, {each}, ", end="")
            print(f"loss {curve.values[0]:.2f} to {lost:.3f}, {right:.0%} of the letters right")
    if options.plain:
        first = [values[:50] for values in finished.values()]
        print(
            f"The curves are at most {np.abs(np.subtract(*first)).max():.0e} apart in the first {len(first[0])} steps."
        )


if __name__ == "__main__":
    main()
