"""torch's operations in the language of the loop: one short rule each, entered under its names."""

from loopfold.stepgraph.rules import choices, dimensions, layout, pointwise, products
from loopfold.stepgraph.rules.registry import OWN, RULES

__all__ = ["OWN", "RULES", "choices", "dimensions", "layout", "pointwise", "products"]
