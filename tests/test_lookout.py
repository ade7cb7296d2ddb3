"""What a puzzle forbids is known by the function itself: no alias hides it, and its name alone is no offence."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.nn import softmax as sm

from pallas_puzzles import check, normal
from pallas_puzzles.course import curriculum, session
from pallas_puzzles.course.collecting import collecting
from pallas_puzzles.view.verdict import Verdict

X = normal((24, 128))
TILE = pl.BlockSpec((8, 128), lambda i: (i, 0))


def by_rows(kernel: Any, x: Any) -> Any:
    return pl.pallas_call(kernel, grid=(3,), in_specs=[TILE], out_specs=TILE, out_shape=x)(x)


def row_softmax_spec(x: Any) -> Any:
    return jax.nn.softmax(x, axis=1)


def judged(fn: Any, spec: Any = row_softmax_spec, **options: Any) -> Verdict:
    with collecting() as verdicts:
        check("mine/1", fn, spec, X, **options)
    (verdict,) = verdicts
    return verdict


of_rows, jitted, lanes = functools.partial(sm, axis=1), jax.jit(sm), jax.vmap(sm)
kept = {"s": lambda v: jax.nn.softmax(v, axis=1)}


@jax.jit
def helper(v: Any) -> Any:
    return sm(v)  # <- here


def wrapped_spec(v: Any) -> Any:
    return kept["spec"](v)


kept["spec"] = row_softmax_spec


def kwargs_of(v: Any) -> dict[str, Any]:
    return {"x": v}


class Hides:
    def __init__(self, v: Any) -> None:
        self.v = v

    def __call__(self) -> Any:
        return sm(self.v)

    def __invert__(self) -> Any:
        return jax.nn.softmax(self.v)

    @property
    def shares(self) -> Any:
        return sm(self.v)


HIDDEN = {
    "alias": lambda v: sm(v),
    "getattr": lambda v: getattr(jax.nn, "soft" + "max")(v),
    "globals": lambda v: globals()["sm"](v),
    "partial": lambda v: of_rows(v),
    "partial made inside": lambda v: functools.partial(jax.nn.softmax, axis=1)(v),
    "jit": lambda v: jitted(v),
    "vmap": lambda v: lanes(v),
    "handed to vmap": lambda v: jax.vmap(jax.nn.softmax)(v),
    "a lambda in a dictionary": lambda v: kept["s"](v),
    "a helper under jit": lambda v: helper(v),
    "a list of arguments": lambda v: sm(*[v]),
    "a list of arguments of a helper": lambda v: (lambda u: sm(u))(*[v]),
    "arguments by name": lambda v: jitted(**kwargs_of(v)),
    "cond": lambda v: lax.cond(True, sm, jnp.exp, v),
    "switch": lambda v: lax.switch(0, [sm, jnp.exp], v),
    "map": lambda v: next(map(sm, [v])),
    "an object that is called": lambda v: Hides(v)(),
    "an operator": lambda v: ~Hides(v),
    "an attribute": lambda v: Hides(v).shares,
    "eval": lambda v: eval("sm(v)"),
}


@pytest.mark.parametrize("how", HIDDEN)
@pytest.mark.parametrize("traced_before", [False, True])
def test_no_alias_hides_what_is_forbidden_in_a_kernel(how: str, traced_before: bool) -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = HIDDEN[how](x_ref[...])

    def fn(x: Any) -> Any:
        return by_rows(kernel, x)

    if traced_before:
        assert judged(fn), "allowed, where nothing forbids it"
    verdict = judged(fn, forbid=("softmax",))
    assert verdict.status == "failed"
    (finding,) = verdict.findings
    assert finding.kind == "forbidden"
    assert finding.cause.startswith("softmax does the work for you")
    assert finding.line is not None
    assert finding.line.text
    assert "def " not in finding.line.text


def test_a_function_of_the_readers_may_have_the_same_name() -> None:
    def softmax(v: Any) -> Any:
        e = jnp.exp(v - v.max(axis=1, keepdims=True))
        return e / e.sum(axis=1, keepdims=True)

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = softmax(x_ref[...])

    assert judged(lambda x: by_rows(kernel, x), forbid=("softmax", "log_softmax", "logsumexp"))


@pytest.mark.parametrize(
    "call", [lambda v: globals()["row_softmax_spec"](v), lambda v: row_softmax_spec(*[v]), wrapped_spec]
)
def test_a_spec_is_known_whatever_it_is_called(call: Any) -> None:
    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = call(x_ref[...])

    verdict = judged(lambda x: by_rows(kernel, x))
    assert verdict.findings[0].cause.startswith("row_softmax_spec says what to compute")


@pytest.mark.parametrize(
    ("name", "fn"),
    [
        ("at", lambda x: jnp.zeros_like(x).at[jnp.arange(24)].add(2 * x)),
        ("at", lambda x: lax.scatter_add(
            jnp.zeros_like(x), jnp.arange(24)[:, None], 2 * x, lax.ScatterDimensionNumbers((1,), (0,), (0,)))),
        ("vjp", lambda x: jax.vjp(lambda v: v * v, x)[1](jnp.ones_like(x))[0]),
        ("vjp", lambda x: jax.vjp(*[lambda v: v * v, x])[1](jnp.ones_like(x))[0]),
        ("cumsum", lambda x: 2 * x + 0 * x.cumsum(axis=0)),
    ],
)  # fmt: skip
def test_methods_and_transforms_are_known_too(name: str, fn: Any) -> None:
    assert judged(fn, lambda x: 2 * x, kernel=False)
    verdict = judged(fn, lambda x: 2 * x, kernel=False, forbid={name: "not here"})
    assert [f.cause for f in verdict.findings] == ["not here"]


def test_a_name_that_a_librarys_function_has_yet_to_give_is_nothing_to_look_at() -> None:
    text = "def make():\n    def later():\n        return value\n    yield later\n    value = 1\n    yield\n"
    exec(compile(text, "<string>", "exec"), names := {})  # what is not in a file is a library's
    later = next(names["make"]())
    assert judged(lambda x: 2 * x if callable(later) else x, lambda x: 2 * x, kernel=False, forbid=("at",))


def test_what_jax_itself_calls_is_not_the_readers() -> None:
    def fn(x: Any) -> Any:  # jnp.repeat scatters inside, x.at[i].get() fetches
        return 2 * x.at[jnp.repeat(jnp.arange(12), 2, total_repeat_length=24) * 0 + jnp.arange(24)].get()

    assert judged(fn, lambda x: 2 * x, kernel=False, forbid=("at",))


@pytest.mark.parametrize("kernel", [True, False])
def test_numpy_on_the_host_is_refused(kernel: bool) -> None:
    def fn(x: Any) -> Any:
        y = jax.pure_callback(lambda v: np.asarray(2 * v), x, x)  # <- here
        return by_rows(lambda x_ref, o_ref: o_ref.__setitem__(..., x_ref[...]), y) if kernel else y

    verdict = judged(fn, lambda x: 2 * x, kernel=kernel)
    assert "pure_callback hands the work to Python on the host" in verdict.findings[0].cause
    assert verdict.findings[0].line is not None
    assert "# <- here" in verdict.findings[0].line.text


CALLS = ["jax.nn.softmax(*[x_ref[...]], axis=1)", "jax.lax.cond(True, rows, rows, x_ref[...])"]


@pytest.mark.parametrize("call", CALLS)
def test_in_a_hole_nothing_hides_it(call: str) -> None:
    """A hole has a name that the notebook defines, too."""
    rows = "rows = functools.partial(jax.nn.softmax, axis=1)"
    kernel = f"def row_softmax_kernel(x_ref, o_ref):\n    o_ref[...] = {call}\n"
    verdict = session.run("softmax/1", overlay=f"import functools\nimport jax\n{rows}\n{kernel}")
    assert [f.kind for f in verdict.findings] == ["forbidden"]


def test_the_course_may_call_what_the_reader_may_not() -> None:
    """softmax/6 forbids vjp, and the function that it checks asks for a gradient."""
    source = (curriculum.notebook(curriculum.puzzle("softmax/6").path)).path.parents[1] / "solutions" / "softmax.py"
    assert session.run("softmax/6", overlay=source.read_text("utf-8"))
