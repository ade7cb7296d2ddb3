"""Array code without a kernel that is right and costs too much."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from ..diagnose.findings import Finding
from ..ir.capture import primitive_of
from ..ir.eager import operations, products
from ..ir.program import count_operations, equations, has_python_loop, temporaries
from ..text import human_bytes
from .budget import Budget, over
from .costs import wide_operands


def over_budget(fn: Callable[..., Any], args: Sequence[Any], jaxpr: Any, budget: Budget) -> list[Finding]:
    """A right answer that costs too much. jaxpr: its program."""
    if (most := budget.operations) is not None and (count := count_operations(jaxpr)) > most:
        text = f"it takes {count} array operations; the budget is {most}."
        if has_python_loop(jaxpr):
            text += " Under jit a Python loop is written out, turn by turn: let one operation do all at once."
        return [over("operations", text)]
    if (most := budget.elements) is not None:
        made_arrays = ((math.prod(shape), shape, line) for shape, _, line in temporaries(jaxpr))
        size, shape, line = max(made_arrays, key=lambda each: each[0], default=(0, (), None))
        if size > most:
            text = (
                f"on the way it makes an array of shape {shape}, {size:,} numbers; the largest may have {most:,} here. "
                "A table of everything against everything grows with the product of both: work out each number by "
                "itself, or fetch it by its index."
            )
            return [over("elements", text, line=line)]
    if (bits := budget.mxu_bits) is not None:
        products_made = ((eqn, line) for eqn, line in equations(jaxpr) if primitive_of(eqn) == "dot_general")
        wide = [found.but(line=line) for eqn, line in products_made if (found := wide_operands(eqn, bits)) is not None]
        if wide:
            return wide
    shapes = [jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype) for x in args]
    if (most := budget.flops) is not None and (flops := sum(products(fn, shapes).values())) > most:
        return [over("flops", f"its matrix products take {flops:,.0f} FLOPs; the budget is {most:,}.")]
    if (most := budget.hbm_bytes) is None:
        return []
    programs = operations(fn, shapes, inside=True)
    moved = sum(each.moved_bytes for each in programs)
    if moved <= most:
        return []
    text = (
        f"its {len(programs)} programs move {human_bytes(moved)}; the budget is {human_bytes(most)}. Each operation is "
        "a program here, also inside of a jax.jit of yours."
    )
    largest = sorted(programs, key=lambda each: -each.moved_bytes)[:4]
    evidence = [f"{each.name}: {human_bytes(each.moved_bytes)}" for each in largest]
    return [over("hbm_bytes", text, evidence, largest[0].line)]
