"""plgpu.inline_mgpu: code of a level below Pallas. It is let write its operations, and those are read.

Fences and named barriers (bar.sync, bar.arrive) are understood; a function that does more is not followed. JAX's MLIR
contexts and Mosaic GPU's arrays are not public API: seen on jax 0.11.2 and 0.12.0.1.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

from .ops import Beyond

_THREADS_OF_A_WARPGROUP = 128
_BAR = re.compile(r"^(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?\s+(\$?\d+)\s*,\s*(\d+)\s*;?$")
_RELEASES = ("fence.proxy.async;", "fence.proxy.async.shared", "fence.proxy.async::generic.release")
# Operations that compute numbers for others, or only order what the machine runs in order.
_SILENT = ("arith.", "gpu.thread_id", "gpu.block_", "nvvm.shfl", "nvvm.bar.warp", "func.")


def read_inline(p: Any, ins: Sequence[int]) -> tuple[str, dict[str, Any]]:
    """(kind, what is known) of an inline_mgpu with these operands. Raises Beyond."""
    if p["flat_ret_ty"] or not all(hasattr(t, "to_mgpu") for t in p["flat_arg_types"]):
        raise Beyond("inline_mgpu with Refs or results: code of a level below Pallas")
    found = [read for read in _operations(p, ins) if read is not None]
    if len(found) > 1:
        raise Beyond("inline_mgpu with several barriers or fences in one")
    return found[0] if found else ("silent", {})


def _operations(p: Any, ins: Sequence[int]) -> list[tuple[str, dict[str, Any]] | None]:
    """What the function writes, each as _read gives it."""
    from jax.experimental.mosaic import gpu as mosaic  # half a second, for kernels for a GPU alone

    with mlir.make_ir_context() as context, ir.Location.unknown(context):
        context.allow_unregistered_dialects = True
        module = ir.Module.create()
        i32 = ir.IntegerType.get_signless(32)
        for part, number in (("major", 9), ("minor", 0)):
            module.operation.attributes[f"mosaic_gpu.arch_{part}"] = ir.IntegerAttr.get(i32, number)
        with ir.InsertionPoint(module.body):
            block = func.FuncOp("inline", ir.FunctionType.get([i32] * len(ins), [])).add_entry_block()
        with ir.InsertionPoint(block):
            values = [
                mosaic.FragmentedArray.splat(a, (), layout=t.to_mgpu(), is_signed=True)
                for a, t in zip(block.arguments, p["flat_arg_types"], strict=True)
            ]
            try:
                p["mgpu_fn"](None, *jax.tree.unflatten(p["pytree_args"], values))
            except Exception as error:
                raise Beyond(f"inline_mgpu ({type(error).__name__}: {error})") from error
        return [_read(op, dict(zip(block.arguments, ins, strict=True))) for op in block.operations]


def _text(op: Any) -> str:
    """The assembly of an operation that is made of it, and the kind of others."""
    if op.operation.name == "llvm.inline_asm":
        return ir.StringAttr(op.attributes["asm_string"]).value.strip()
    return str(op.attributes["kind"]) if "kind" in op.attributes else ""


def _read(op: Any, slots: dict[Any, int]) -> tuple[str, dict[str, Any]] | None:
    """(kind, what is known) of an operation; None for one that does nothing here. slots: of the arguments."""
    name, text = op.operation.name, _text(op)
    if name == "nvvm.fence.proxy" or text.startswith(_RELEASES):
        return "commit_smem", {}
    if name == "nvvm.tcgen05.wait":
        return "commit_tmem" if "store" in text else "wait_tmem", {}
    if name == "nvvm.tcgen05.fence":
        return ("fence_tensor", {}) if "before" in text else None
    if name.startswith(_SILENT) or text.startswith("fence"):
        return None
    if (bar := _BAR.match(text)) is None:
        raise Beyond(f"inline_mgpu with {text or name}: code of a level below Pallas")
    verb, which, threads = bar.groups()
    known: dict[str, Any] = {"threads": int(threads), "waits": verb == "sync"}
    if not which.startswith("$"):
        return "named", {**known, "number": int(which)}
    slot = slots.get(op.operands[int(which[1:])])
    if slot is not None:
        return "named", {**known, "slot": slot}
    if int(threads) == _THREADS_OF_A_WARPGROUP:
        return None  # a warpgroup's own threads, which the machine has in step
    raise Beyond("inline_mgpu with a named barrier whose number it computes itself")
