"""What somebody with a GPU would call in place of a kernel: cuBLAS, cuDNN, and tokamax where it is installed."""

import dataclasses
import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from ..ir.asked import Attention, Product, asked

CUBLAS, CUDNN, TOKAMAX = "cuBLAS", "cuDNN", "tokamax"

Peer = Callable[..., Any]


def peers(spec: Peer, args: Sequence[Any]) -> dict[str, Peer]:
    """Library calls that compute a spec, by name; none where it is neither a product nor attention."""
    if not all(hasattr(x, "dtype") for x in args):
        return {}
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    found = asked(spec, given)
    if isinstance(found, Product):
        return {CUBLAS: _Cublas(found)}
    if isinstance(found, Attention) and given[0].dtype.itemsize == 2:  # cuDNN has no other
        calls: dict[str, Peer] = {CUDNN: AttentionBy(_CUDNN, found)}
        if importlib.util.find_spec(TOKAMAX) is not None:
            calls[TOKAMAX] = AttentionBy(_tokamax, found)
        return calls
    return {}


@dataclasses.dataclass(frozen=True)
class _Cublas:
    """A matrix product by XLA, whose own kernels are ruled out: it prefers them at some sizes."""

    product: Product
    compiler_options: ClassVar[dict[str, Any]] = {"xla_gpu_enable_triton_gemm": False}

    def __call__(self, a: Any, b: Any) -> Any:
        out = self.product.dtype
        wide = jnp.int32 if jnp.issubdtype(a.dtype, jnp.integer) else jnp.float32
        made_as = out if out == jnp.bfloat16 else wide  # cuBLAS sums in float32, and rounds as it stores
        made = jax.lax.dot_general(a, b, self.product.dimensions, preferred_element_type=made_as)
        return made.astype(out)


@dataclasses.dataclass(frozen=True)
class AttentionBy:
    """Attention by a call that takes (B, S, H, D), scale and is_causal."""

    call: Peer
    attention: Attention

    def __call__(self, q: Any, k: Any, v: Any) -> Any:
        swap = self.attention.heads_first
        q, k, v = (x.swapaxes(1, 2) if swap else x for x in (q, k, v))
        out = self.call(q, k, v, scale=self.attention.scale, is_causal=self.attention.causal)
        return out.swapaxes(1, 2) if swap else out


_CUDNN = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


def _tokamax(q: Any, k: Any, v: Any, **how: Any) -> Any:
    return importlib.import_module(TOKAMAX).dot_product_attention(q, k, v, **how)
