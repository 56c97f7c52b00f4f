"""torch's operations in the language of the loop: one short rule each, entered under its names."""

from loopfold.stepgraph.rules import dimensions, layout, pointwise, products
from loopfold.stepgraph.rules.registry import OWN, RULES

__all__ = ["OWN", "RULES", "dimensions", "layout", "pointwise", "products"]
