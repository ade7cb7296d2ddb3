"""What a reader's own model says of a kernel for a GPU, held against what the machine counts."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..ir.ops import nbytes_of
from .claims import Claim, _bytes, _Part, _Sum, _times, answered

if TYPE_CHECKING:
    from ..diagnose.findings import Finding
    from ..lens.gpu import Launched


def gmem_claim(model: Callable[..., Any], run: Callable[..., Any], *cases: tuple[Any, ...]) -> Claim:
    """model(*case) is how many bytes `run(*case)`, which returns (function, its arguments), moves to and from GMEM."""
    return Claim(model, cases, lambda *args: _traffic(_launched(*run(*args))))


def order_claim(order: Callable[..., Any], *cases: tuple[int, int], ctas: int = 132) -> "Order":
    """order(t, m_tiles, width) numbers tiles so that CTAs share what they read. cases: (m_tiles, width)."""
    return Order(order, cases, ctas)


@dataclasses.dataclass(frozen=True)
class Order:
    """`fn(t, m_tiles, width)`, the row and column of tile t, lets CTAs that run at the same time share what they
    read: the machine has no L2. cases: (m_tiles, width). ctas: how many run. The tiles of strips of `width` columns,
    row by row, are what it is compared with; whether each tile has its turn, the kernel's result shows."""

    fn: Callable[..., Any]
    cases: Sequence[tuple[int, int]]
    ctas: int
    last = True

    def finding(self) -> "Finding | None":
        """What is wrong with the order, in the first case where something is, or None."""
        return next((f for f in (self._in_case(*case) for case in self.cases) if f), None)

    def _in_case(self, m_tiles: int, width: int) -> "Finding | None":
        import jax
        import jax.numpy as jnp
        import numpy as np

        from ..diagnose.findings import Finding
        from ..ir.capture import source_line

        numbers = jnp.arange(self.ctas, dtype=jnp.int32)
        rows, columns = answered(jax.vmap(lambda t: self.fn(t, m_tiles, width)), numbers)
        n = np.arange(self.ctas)
        strip, within = n // (m_tiles * width), n % (m_tiles * width)
        want, found = _parts(within // width, strip * width + within % width), _parts(rows, columns)
        if sum(found) <= sum(want):
            return None
        code = self.fn.__code__
        cause = (
            f"Right answer, but {self.ctas} CTAs that work on the first {self.ctas} tiles by {self.fn.__name__}(t, "
            f"{m_tiles}, {width}) read {found[0]} different rows of tiles and {found[1]} columns. In strips of {width} "
            f"columns, they read {want[0]} and {want[1]}: what several of them read comes from the L2."
        )
        return Finding("choice", cause, [], source_line(code.co_filename, code.co_firstlineno))


def _parts(rows: Any, columns: Any) -> tuple[int, int]:
    return len(set(map(int, rows))), len(set(map(int, columns)))


def _launched(fn: Callable[..., Any], args: Sequence[Any]) -> "Launched":
    from ..lens import gpu

    (launched,) = gpu.run(fn, *args, ctas_drawn=0).calls
    if launched.findings:
        raise ValueError("the kernel goes wrong, which is for its own verdict to say")
    return launched


def _traffic(launched: "Launched") -> _Sum:
    kernel, counts = launched.kernel, launched.counts
    ways = [(kernel.inputs, counts.gmem_read_bytes, "read"), (kernel.outputs, counts.gmem_write_bytes, "written")]
    parts = [_moved(arrays, moved, verb, kernel.grid) for arrays, moved, verb in ways if arrays]
    return _Sum("your kernel moves", tuple(parts), itemsize=kernel.outputs[0][2].itemsize)


def _moved(arrays: Sequence[Any], moved: float, verb: str, grid: dict[Any, int]) -> _Part:
    names = " and ".join(name for name, *_ in arrays)
    once = sum(nbytes_of(shape, dtype) for _, shape, dtype in arrays)
    times = moved / once
    other = {1.0, *map(float, grid.values())} - {times}
    slips = [(0.0, f"if {names} moved nothing")]
    slips += [(count / times, f"if all of {names} was {verb} {_times(count)}") for count in sorted(other) if times]
    return _Part(moved, f"{names}, {_bytes(once)}: {verb} {_times(times)}", tuple(slips))
