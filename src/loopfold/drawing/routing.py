"""Edges and labels that do not collide: of a few ways that each could go, the one in the way of the least."""

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from loopfold.telling import tell

Points = NDArray[np.float64]  # [points, 2], in inches

GAP = 0.09  # between an edge and a node that it passes
BETWEEN = np.array([0.1, 0.0])  # two labels side by side, which would be read as one
WIDE = 0.15  # half the width of a label that takes its place before others
SAMPLES = 25  # points along a curve
ROUNDS = 3  # of new orders in which labels choose their places


@dataclass(frozen=True)
class Spot:
    """Where a node stands, and how much room it takes: half its width and height."""

    x: float
    y: float
    half_width: float
    half_height: float
    round: bool = False

    @property
    def centre(self) -> Points:
        return np.array([self.x, self.y])

    def holds(self, points: Points, margin: float = 0.0) -> NDArray[np.bool_]:
        """Which points lie on the node, or nearer to it than `margin`."""
        away = np.abs(points - self.centre)
        if self.round:
            return np.hypot(away[:, 0], away[:, 1]) < self.half_width + margin
        return (away[:, 0] < self.half_width + margin) & (away[:, 1] < self.half_height + margin)


@dataclass(frozen=True)
class Line:
    """An edge to be routed. Lines of one `kind` and shape, as those of every step, go the same way."""

    source: Hashable
    target: Hashable
    kind: Hashable
    label: tuple[float, float] = (0.0, 0.0)  # half the width and height of its label; zero for none
    half: float = 0.01  # half its own width
    via: tuple[tuple[float, float], ...] = ()  # points that it must pass
    ends: tuple[float, float] = (0.0, 0.0)  # how far right of the middle of its source and target it begins and ends


@dataclass(frozen=True)
class Route:
    """The way of an edge from border to border, and the middle of its label; `on`: the label interrupts the edge."""

    points: Points
    label: tuple[float, float] | None
    on: bool = False


def route(spots: dict[Hashable, Spot], lines: list[Line]) -> list[Route]:
    """A way for every line, then a place for every label."""
    return _Router(spots, lines).routes()


class _Router:
    def __init__(self, spots: dict[Hashable, Spot], lines: list[Line]) -> None:
        self.spots = spots
        self.lines = lines
        self.number = {key: i for i, key in enumerate(spots)}
        self.centres = np.array([spot.centre for spot in spots.values()])
        self.halves = np.array([(spot.half_width, spot.half_height) for spot in spots.values()])
        self.round = np.array([spot.round for spot in spots.values()])
        self.paths: list[Points] = [np.zeros((0, 2))] * len(lines)
        self.taken = np.zeros((0, 2))  # points along all ways that are known
        self.owner = np.zeros(0, dtype=int)  # the edge that each belongs to
        self.pieces = np.zeros((2, 0, 2))  # the straight pieces of all ways that are known: their starts, their ends
        self.boxes = np.zeros((0, 4))  # labels that have their place: middle, half width and height
        self.two_way = {(line.source, line.target) for line in lines} & {(ln.target, ln.source) for ln in lines}
        self.floor = float((self.centres - self.halves)[:, 1].min()) - 0.25

    def routes(self) -> list[Route]:
        order = self._from_the_middle()
        known: dict[Hashable, Points] = {}  # the way relative to where it starts
        for done, i in enumerate(order, start=1):
            tell("drawing", done, len(order), "arrows")
            line = self.lines[i]
            start = self.spots[line.source].centre
            key = self._shape(line)
            if key not in known:
                known[key] = self._best(line) - start
            path = self.paths[i] = self._trimmed(known[key] + start, line)
            points = _spaced(path)
            self.taken = np.concatenate([self.taken, points])
            self.owner = np.concatenate([self.owner, np.full(len(points), i)])
            self.pieces = np.concatenate([self.pieces, [path[:-1], path[1:]]], 1)
        wide = [i for i in order if self.lines[i].label[0] > WIDE]  # beside a short line there are two places, at least
        order = [i for i in (*wide[::-1], *(i for i in order if i not in wide)) if any(self.lines[i].label)]
        best, least = self._labelled(order)
        for _ in range(ROUNDS):
            if not (hindered := {self._named(i) for i, hits in least.items() if hits}):
                break
            order.sort(key=lambda i: self._named(i) not in hindered)  # those that found no free place go first
            routes, hits = self._labelled(order)
            if sum(hits.values()) < sum(least.values()):
                best, least = routes, hits
        return best

    def _labelled(self, order: list[int]) -> tuple[list[Route], dict[int, float]]:
        """Every way with a place for its label, chosen in this order; and how much each label lies on."""
        routes = [Route(path, None) for path in self.paths]
        places: dict[Hashable, tuple[Points, bool]] = {}
        found: dict[int, float] = {}
        self.boxes = np.zeros((0, 4))
        for i in order:
            start = self.spots[self.lines[i].source].centre
            nearby = self._nearby(i)
            place, on = places.get(self._named(i), (None, False))
            if place is None or self._hits(i, place + start, on, *nearby):
                place, on = self._free_place(i, nearby)
                place = place - start
            places.setdefault(self._named(i), (place, on))
            x, y = (place + start).tolist()
            routes[i] = Route(self.paths[i], (x, y), on)
            found[i] = self._hits(i, place + start, on, *nearby)
            self.boxes = np.concatenate([self.boxes, [[x, y, *self.lines[i].label]]])
        return routes, found

    def _named(self, i: int) -> Hashable:
        """The shape of a line and its label: that of every step has its label at the same place."""
        return self._shape(self.lines[i]), self.lines[i].label

    def _from_the_middle(self) -> list[int]:
        """Short lines first; of one length, those in the middle: what is free there is free at the borders too."""
        centre = float(self.centres[:, 0].mean())
        return sorted(range(len(self.lines)), key=lambda i: self._rank(self.lines[i], centre))

    def _rank(self, line: Line, centre: float) -> tuple[bool, float, float]:
        a, b = self.spots[line.source], self.spots[line.target]
        length = abs(a.x - b.x) + abs(a.y - b.y)
        return not line.via, round(length, 3), round(abs((a.x + b.x) / 2 - centre), 3)

    def _shape(self, line: Line) -> Hashable:
        way = self.spots[line.target].centre - self.spots[line.source].centre
        via = np.round(np.array(line.via).reshape(-1, 2) - self.spots[line.source].centre, 4).tolist()
        return line.kind, line.ends, *np.round(way, 4).tolist(), *map(tuple, via)

    # ------------------------------------------------------------------ ways

    def _best(self, line: Line) -> Points:
        a, b = self.spots[line.source], self.spots[line.target]
        a, b = replace(a, x=a.x + line.ends[0]), replace(b, x=b.x + line.ends[1])
        if line.via:
            return _rounded([a.centre, *(np.array(point) for point in line.via), b.centre])
        best, least = None, np.inf
        shortest = 0.3 * float(np.hypot(*(b.centre - a.centre)))
        for way, reluctance in self._ways(line, a, b):
            if reluctance + shortest >= least:
                continue
            cost = reluctance + self._on_its_way(way, line)
            if cost < least and (cost := cost + self._crossed(way, line)) < least:
                best, least = way, cost
        assert best is not None
        return best

    def _ways(self, line: Line, a: Spot, b: Spot) -> Iterator[tuple[Points, float]]:
        """Ways from centre to centre, and how much we would rather not take each."""
        chord = b.centre - a.centre
        length = float(np.hypot(*chord)) or 1.0
        normal = np.array([chord[1], -chord[0]]) / length  # to the right of the direction of travel
        t = np.linspace(0, 1, SAMPLES)[:, None]
        if (line.source, line.target) not in self.two_way:
            yield a.centre + t * chord, 0.0
        for bulge in (0.3, 0.4, 0.5, 0.6, 0.8, 1.0, 1.3, 1.6, 2.0, 2.5):
            for side in (1, -1):
                for lean in (0.5, 0.3, 0.7):  # where along the way it is widest
                    control = a.centre + lean * chord + side * 2 * bulge * normal
                    curve = (1 - t) ** 2 * a.centre + 2 * t * (1 - t) * control + t**2 * b.centre
                    yield curve, 0.5 + bulge + (0.3 if side < 0 else 0.0) + abs(lean - 0.5)
        if abs(chord[0]) > 0.2 and abs(chord[1]) > 0.2:  # along a lane between columns, or between rows
            for lane in (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9):
                x, y = a.centre + lane * chord
                if abs(chord[1]) > 1.2:  # and from there to a border of the target that others do not come to
                    turn = np.array([x, b.y - math.copysign(0.6, chord[1])])
                    yield _rounded([a.centre, np.array([x, a.y]), turn, b.centre]), 1.1 + abs(lane - 0.5)
                yield _rounded([a.centre, np.array([x, a.y]), np.array([x, b.y]), b.centre]), 1.2 + abs(lane - 0.5)
                yield _rounded([a.centre, np.array([a.x, y]), np.array([b.x, y]), b.centre]), 1.2 + abs(lane - 0.5)
        for aside in (0.45, -0.45, 0.6, -0.6, 0.75, -0.75):  # down beside the column, and below everything
            corners = [(a.x + aside, a.y - 0.5), (a.x + aside, self.floor), (b.x, self.floor)]
            yield _rounded([a.centre, *map(np.array, corners), b.centre]), 4.0 + abs(aside)

    def _on_its_way(self, path: Points, line: Line) -> float:
        """The cost of the nodes that a way touches, and of its length."""
        points = _spaced(path, 0.05)
        low, high = points.min(0) - GAP, points.max(0) + GAP
        close = ((self.centres + self.halves > low) & (self.centres - self.halves < high)).all(1)
        close[[self.number[line.source], self.number[line.target]]] = False
        near = self._on_nodes(points, close, GAP)
        return 30.0 * float(near.any(1).sum()) + 0.3 * float(np.hypot(*np.diff(path, axis=0).T).sum())

    def _crossed(self, path: Points, line: Line) -> float:
        """The cost of the other ways that it crosses or runs along."""
        path = self._trimmed(path, line)
        if len(path) < 2:
            return 1e6
        low, high = path.min(0) - 0.05, path.max(0) + 0.05
        others = self.taken[((self.taken > low) & (self.taken < high)).all(1)][::2]
        points = _spaced(path, 0.08)[2:-2]
        along = False
        if len(points) > 3 and len(others):
            near = np.abs(points[:, None] - others[None]).max(-1).min(1) < 0.045
            along = bool((near[:-3] & near[1:-2] & near[2:-1] & near[3:]).any())  # four in a row: it is no crossing
        return 0.2 * _crossings(path, self.pieces) + 12.0 * along  # straight lines that cross are read well

    def _on_nodes(self, points: Points, nodes: NDArray[np.bool_], margin: float) -> NDArray[np.bool_]:
        """`[points, nodes]`: which points lie on which of these nodes, or nearer than `margin`."""
        halves = self.halves[nodes] + margin
        away = np.abs(points[:, None] - self.centres[nodes])
        on_circle = np.hypot(away[..., 0], away[..., 1]) < halves[:, 0]
        return np.where(self.round[nodes], on_circle, (away < halves).all(-1))

    def _trimmed(self, path: Points, line: Line) -> Points:
        """The part of a way between the borders of its two nodes."""
        fine = resampled(path, 400)
        inside = self.spots[line.source].holds(fine, 0.02)
        first = int(np.flatnonzero(inside)[-1]) + 1 if inside.any() else 0
        inside = self.spots[line.target].holds(fine[first:], 0.05)
        last = first + (int(np.flatnonzero(inside)[0]) if inside.any() else len(fine) - first)
        return _thinned(fine[first:last])

    # ------------------------------------------------------------------ labels

    def _free_place(self, i: int, nearby: tuple[Points, NDArray[np.bool_]]) -> tuple[Points, bool]:
        """Beside the middle of a way if it can be, else nearer to an end, else on it, else further away."""
        places = self._along(i, *nearby)
        best, least = (places[0][0], True), np.inf
        for place, on in (*self._beside(i, places, 0.13), *self._upon(i, places), *self._beside(i, places, np.inf)):
            hits = self._hits(i, place, on, *nearby)
            if hits < least:
                best, least = (place, on), hits
            if not hits:
                break
        return best

    def _along(self, i: int, points: Points, mine: NDArray[np.bool_]) -> list[tuple[Points, Points]]:
        """Points along a way, and its direction there, from the middle out; what it shares with others is last."""
        length = float(np.hypot(*np.diff(self.paths[i], axis=0).T).sum())
        fine = resampled(self.paths[i], max(51, math.ceil(length / 0.04)))
        shared = np.abs(fine[:, None] - points[~mine][None]).max(-1).min(1, initial=np.inf) <= 0.05
        parts = [part for part in (np.flatnonzero(~shared[2:-2]) + 2, np.flatnonzero(shared[2:-2]) + 2) if len(part)]
        middle = parts[0][len(parts[0]) // 2]
        order = [k for part in parts for k in sorted(part, key=lambda k: abs(k - middle))[:: max(1, len(part) // 50)]]
        return [(fine[k], fine[k + 1] - fine[k - 1]) for k in order]

    def _beside(self, i: int, along: list[tuple[Points, Points]], furthest: float) -> Iterator[tuple[Points, bool]]:
        """Places for a label on both sides of its way, up to `furthest` away."""
        half_width, half_height = self.lines[i].label
        for point, way in along:
            normal = np.array([-way[1], way[0]]) / (np.hypot(*way) or 1.0)
            if normal[1] < -0.2 or (abs(normal[1]) <= 0.2 and normal[0] > 0):
                normal = -normal  # above, or to the left, if it can be
            away = abs(normal[0]) * half_width + abs(normal[1]) * half_height + 0.04 + self.lines[i].half
            more = min(away, furthest)
            for further in (0.0, 0.4, 0.9, 1.5):
                for side in (1, -1):
                    yield point + side * (away + more * further) * normal, False

    def _upon(self, i: int, along: list[tuple[Points, Points]]) -> Iterator[tuple[Points, bool]]:
        """Places for a label on its way, of which both ends can still be seen."""
        half = np.array(self.lines[i].label) + 0.02
        way = _spaced(self.paths[i])
        ends = np.concatenate([way[:3], way[-6:]])
        return ((point, True) for point, _ in along if not (np.abs(ends - point) < half).all(1).any())

    def _nearby(self, i: int) -> tuple[Points, NDArray[np.bool_]]:
        """The points of ways around line `i`, and which are its own."""
        low, high = self.paths[i].min(0) - 0.8, self.paths[i].max(0) + 0.8
        near = ((self.taken > low) & (self.taken < high)).all(1)
        return self.taken[near], self.owner[near] == i

    def _hits(self, i: int, place: Points, on: bool, points: Points, mine: NDArray[np.bool_]) -> float:
        """How much else the label of line `i` would lie on, and whether it would be taken for that of another."""
        half = np.array(self.lines[i].label) + 0.02
        nearest = np.clip(self.centres, place - half, place + half)
        away = np.abs(nearest - self.centres)
        nodes = np.where(self.round, np.hypot(*away.T) < self.halves[:, 0], (away < self.halves).all(1))
        boxes = (np.abs(self.boxes[:, :2] - place) < self.boxes[:, 2:] + half + BETWEEN).all(1)
        gap = np.maximum(np.abs(points - place) - half, 0).max(1)  # from the label's border to each point
        nearer = sum(bool((gap[~mine] < gap[mine].min() + more).any()) for more in (-0.01, 0.03))
        over = gap[~mine] if on else gap
        return 50 * int(nodes.sum()) + 50 * int(boxes.sum()) + int((over == 0).sum()) + 1.5 * nearer


# ------------------------------------------------------------------ geometry


def _rounded(corners: list[Points], radius: float = 0.16) -> Points:
    """A way with round corners."""
    points = [corners[0][None]]
    for before, corner, after in zip(corners, corners[1:], corners[2:], strict=False):
        into, out = corner - before, after - corner
        r = min(radius, np.hypot(*into) / 2, np.hypot(*out) / 2)
        start, end = corner - r * into / (np.hypot(*into) or 1), corner + r * out / (np.hypot(*out) or 1)
        t = np.linspace(0, 1, 7)[:, None]
        points.append((1 - t) ** 2 * start + 2 * t * (1 - t) * corner + t**2 * end)
    return np.concatenate([*points, corners[-1][None]])


def resampled(path: Points, count: int) -> Points:
    """The same way as `count` points at equal distances."""
    steps = np.hypot(*np.diff(path, axis=0).T)
    distance = np.concatenate([[0.0], np.cumsum(steps)])
    wanted = np.linspace(0, distance[-1], count)
    return np.stack([np.interp(wanted, distance, path[:, k]) for k in (0, 1)], -1)


def _spaced(path: Points, distance: float = 0.03) -> Points:
    """Points along a way, no further apart than `distance`."""
    length = float(np.hypot(*np.diff(path, axis=0).T).sum())
    return resampled(path, max(2, math.ceil(length / distance) + 1))


def _thinned(path: Points, tolerance: float = 0.002) -> Points:
    """The same way with no more points than it needs (Douglas and Peucker)."""
    if len(path) < 3:
        return path
    way = path[-1] - path[0]
    length = np.hypot(*way) or 1.0
    off = np.abs(way[0] * (path[:, 1] - path[0, 1]) - way[1] * (path[:, 0] - path[0, 0])) / length
    far = int(off.argmax())
    if off[far] < tolerance:
        return path[[0, -1]]
    return np.concatenate([_thinned(path[: far + 1], tolerance)[:-1], _thinned(path[far:], tolerance)])


def _crossings(path: Points, pieces: Points) -> int:
    """How often a way crosses the straight pieces of others."""
    a, b, c, d = path[:-1, None], path[1:, None], pieces[0][None], pieces[1][None]

    def side(u: Points, v: Points, w: Points) -> Points:
        return (v[..., 0] - u[..., 0]) * (w[..., 1] - u[..., 1]) - (v[..., 1] - u[..., 1]) * (w[..., 0] - u[..., 0])

    return int(((side(a, b, c) * side(a, b, d) < 0) & (side(c, d, a) * side(c, d, b) < 0)).sum())
