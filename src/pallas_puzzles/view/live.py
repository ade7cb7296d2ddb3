"""The picture with sliders, where a kernel runs: other block sizes, other steps, and what they cost."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..ir.capture import wrapped
from ..lens.machine import figures
from ..text import human_bytes
from .draw import Picture, html_table, look, running_shell
from .words import in_range


def why_not_live() -> str:
    """Why there can be no sliders here, "" if there can."""
    try:
        import ipywidgets  # noqa: F401
    except ImportError:
        return "live=True needs ipywidgets (pip install ipywidgets); this is the plain picture."
    if getattr(running_shell(), "kernel", None) is None:
        return "live=True needs a notebook with a running kernel; this is the plain picture."
    return ""


def widget_bundle(widget: Any) -> dict[str, Any]:
    """What ipywidgets, 7 or 8, would display, with nothing beside it for pages where no kernel runs."""
    view = {"version_major": 2, "version_minor": 0, "model_id": widget.model_id}
    return {"application/vnd.jupyter.widget-view+json": view}


@dataclasses.dataclass(eq=False)
class LivePicture(Picture):
    """A picture with sliders. The plain picture goes along, for pages where no kernel runs."""

    fn: Callable[..., Any] = lambda: None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)

    def display(self) -> None:
        from IPython.display import display

        display({**self._mimebundle(), **widget_bundle(self.widget())}, raw=True)

    def widget(self) -> Any:
        """Sliders for block sizes, the costs and the picture: an ipywidgets.VBox."""
        return _Bench(self).widget

    def with_sizes(self, sizes: Mapping[str, int], plan_only: bool = False) -> Picture:
        """The plain picture of a run with other block sizes. plan_only: of its blocks alone."""
        return look(self.fn, self.args, {**self.kwargs, **sizes}, plan_only, self.first_step)

    def choices(self) -> dict[str, list[int]]:
        """The block sizes worth offering: a quarter to four times the present one, as far as they run."""

        def runs(name: str, size: int) -> bool:
            plan = self.with_sizes({name: size}, plan_only=True)
            return bool(plan.traces) and not plan.note and _faults(plan) <= _faults(self)

        offered = {}
        for name, now in block_sizes(self.fn, self.kwargs).items():
            sizes = sorted({now, *(now // f for f in (2, 4) if now % f == 0), 2 * now, 4 * now})
            offered[name] = [size for size in sizes if size == now or runs(name, size)]
        return {name: sizes for name, sizes in offered.items() if len(sizes) > 1}


# --- which sizes make sense ------------------------------------------------------------------------------------------


def block_sizes(fn: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, int]:
    """The integer keyword arguments of `fn` and their values: keyword-only ones with a default, and those passed."""
    sizes: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError):
        parameters = inspect.signature(wrapped(fn)).parameters.values()
        sizes = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    whole = {n: v for n, v in (sizes | dict(kwargs)).items() if isinstance(v, int | np.integer)}
    return {name: int(size) for name, size in whole.items() if size > 0 and not isinstance(size, bool)}


def _faults(picture: Picture) -> set[str]:
    """What speaks against block sizes. Those that the reader's own sizes have as well do not count."""
    faults = set()
    for t in picture.traces:
        for k, o in enumerate(t.call.operands):
            if o.in_hbm:
                continue
            if any(d.size > size for d, size in zip(o.dims, o.shape, strict=True)):
                faults.add("larger than the array")
            if not all(in_range(t, k, s) for s in range(t.n)):
                faults.add("out of range")
            # the rule for the last two dimensions of a block: a multiple of 8 and of 128, or the whole of the array
            last = zip(o.block[::-1], o.shape[::-1], (128, 8), strict=False)
            if not all(block == size or block % tile == 0 for block, size, tile in last):
                faults.add("no tiles of (8, 128)")
            if o.role == "out" and t.total is None and all(d.kind != "element" for d in o.dims):
                faults |= {"not all of the result"} if len(set(t.blocks[k])) < math.prod(o.tiles) else set()
    return faults


# --- the widgets -----------------------------------------------------------------------------------------------------

_HEADS = ("", "block sizes", "steps", "VMEM", "HBM traffic", "FLOP per byte")


class _Bench:
    """The sliders and what they change: the costs, and the picture, whose own script steps through it."""

    def __init__(self, picture: LivePicture):
        import ipywidgets

        values = block_sizes(picture.fn, picture.kwargs)
        self.sizes = {
            name: ipywidgets.SelectionSlider(
                value=values[name], options=sizes, description=name, continuous_update=False
            )
            for name, sizes in picture.choices().items()
        }
        self.at_start = _costs(picture, self._chosen())
        self.costs, self.drawn = ipywidgets.HTML(), ipywidgets.Output()  # an HTML would run no script
        self.widget = ipywidgets.VBox([*self.sizes.values(), self.costs, self.drawn])
        for slider in self.sizes.values():
            slider.observe(lambda _: self._tell(picture.with_sizes(self._chosen())), names="value")
        self._tell(Picture(picture.traces, picture.note, first_step=picture.first_step))

    def _chosen(self) -> dict[str, int]:
        return {name: slider.value for name, slider in self.sizes.items()}

    def _tell(self, now: Picture) -> None:
        rows = [("at the start", *self.at_start), ("now", *_costs(now, self._chosen()))]
        self.costs.value = html_table(dict.fromkeys(_HEADS, ""), rows, "<>>>>>")
        self.drawn.outputs = ({"output_type": "display_data", "data": now._mimebundle(), "metadata": {}},)


def _costs(picture: Picture, sizes: Mapping[str, int]) -> tuple[str, ...]:
    costs = [figures(t) for t in picture.traces]
    hbm, flops = sum(c.hbm_bytes for c in costs), sum(c.flops for c in costs)
    return (
        ", ".join(f"{name}={size}" for name, size in sizes.items()) or "–",
        f"{sum(c.steps for c in costs):,}",
        human_bytes(max((c.vmem_bytes for c in costs), default=0)),
        human_bytes(hbm),
        f"{flops / hbm:.3g}" if hbm else "–",
    )
