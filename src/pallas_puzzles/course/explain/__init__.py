"""What a wrong result means, in words and to scale, for check(..., explain=): groups of rows, and routing.

Each function gets what the reader's function was given, what it returned (got=), and what is right (want=). It returns
a sentence or two that say where, why and at what cost, and a picture as text; either may be "".
"""

from .lists import every_group, group_ids, metadata, offsets, tile_ids, tile_visits, tiles
from .routing import any_order, gate, moe, permuted
from .rows import bias, by_tile, grads, product, wiring

__all__ = [
    "any_order",
    "bias",
    "by_tile",
    "every_group",
    "gate",
    "grads",
    "group_ids",
    "metadata",
    "moe",
    "offsets",
    "permuted",
    "product",
    "tile_ids",
    "tile_visits",
    "tiles",
    "wiring",
]
