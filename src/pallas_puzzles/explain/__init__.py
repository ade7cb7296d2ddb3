"""What a wrong result means, in words and to scale, for check(..., explain=): attention and
its gradients, lists of blocks, pages, groups of rows, routing.

Each function gets what the reader's function was given, what it returned (got=), and what is right (want=). It returns
a sentence or two that say where, why and at what cost, and a picture as text; either may be "".
"""

from .attention import causal_flash, causal_scores, flash, flash_and_lse, naive, one_block, scores
from .backward import delta, dq, gradients
from .lists import every_group, group_ids, metadata, offsets, tile_ids, tile_visits, tiles
from .pages import paged, splash
from .routing import any_order, gate, moe, permuted
from .rows import bias, by_tile, grads, product, wiring
from .suspects import recognise

__all__ = [
    "any_order",
    "bias",
    "by_tile",
    "causal_flash",
    "causal_scores",
    "delta",
    "dq",
    "every_group",
    "flash",
    "flash_and_lse",
    "gate",
    "gradients",
    "grads",
    "group_ids",
    "metadata",
    "moe",
    "naive",
    "offsets",
    "one_block",
    "paged",
    "permuted",
    "product",
    "recognise",
    "scores",
    "splash",
    "tile_ids",
    "tile_visits",
    "tiles",
    "wiring",
]
