"""What the signs of a picture mean: a line or two below it, of those that it uses."""

from dataclasses import dataclass

from loopfold.drawing.figure import LIGHT
from loopfold.drawing.routing import Spot
from loopfold.drawing.scene import VANISHED, Link, Scene, Shape, text_size

SMALL, SIGN, GAP = 7.5, 0.32, 0.08  # the size of letters, the width of a sign, and the gap after it
_PAGE, _LARGEST = 8.0, 2.5  # a wider picture is shown smaller, so that its legend is larger, up to so much


@dataclass(frozen=True)
class Key:
    """A sign that a picture uses, and what it means; `x`, `y` is where the sign begins."""

    sign: str | Link | Shape
    text: str
    x: float = 0.0
    y: float = 0.0
    scale: float = 1.0

    @property
    def sign_width(self) -> float:
        written = text_size(self.sign, SMALL)[0] if isinstance(self.sign, str) else 0.0
        return self.scale * max(SIGN, written)

    @property
    def text_at(self) -> float:
        return self.x + self.sign_width + self.scale * GAP

    @property
    def right(self) -> float:
        return self.text_at + self.scale * text_size(self.text, SMALL)[0]


def legend(scene: Scene, left: float, bottom: float, right: float) -> list[Key]:
    """What needs words in a picture, in rows below it."""
    shapes, links = list(scene.shapes.values()), scene.links
    spot = Spot(0, 0, 0.075, 0.075, round=True)
    sized = [link.size for link in links if link.size is not None]
    lines: list[tuple[bool, str | Link | Shape, str]] = [
        (any(s.kind == "square" for s in shapes), Shape(spot, "", LIGHT["delay"], "square"), "a delay of one step"),
        (
            any(s.dashed for s in shapes),
            Shape(spot, "", LIGHT["paper"], "circle", dashed=True),
            "what it starts from",
        ),
        (any(link.dashed for link in links), Link(0, 0, 0, dashed=True), "fed back"),
        (any(s.kind == "dots" for s in shapes), r"$\cdots$", "steps that are not shown"),
        (any(r"(\tau)" in s.text for s in shapes), r"$(\tau)$", "after the last step alone"),
        (any(s.note for s in shapes), "0.1", "the size of the gradient there, ‖∂L/∂·‖"),
        (bool(sized), Link(0, 0, 0, size=1.0), "the largest gradient on an edge"),
        (bool(sized) and min(sized) < 0.03, Link(0, 0, 0, size=1e-3), "a thousandth of it or less"),
        (bool(sized) and min(sized) < VANISHED, Link(0, 0, 0, size=0.0), "less than a millionth"),
    ]
    lines += [(True, f"${symbol} = {meaning}$", "") for symbol, meaning in scene.said]
    keys: list[Key] = []
    scale = min(max(1.0, (right - left) / _PAGE), _LARGEST)
    x, y = left + 0.12, bottom - 0.12 * scale
    for sign, text in ((sign, text) for wanted, sign, text in lines if wanted):
        key = Key(sign, text, x, y, scale)
        if keys and key.right > right:
            key = Key(sign, text, left + 0.12, y - 0.2 * scale, scale)
        keys.append(key)
        x, y = key.right + 0.25 * scale, key.y
    return keys
