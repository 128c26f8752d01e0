"""Rules for operators that move, join, divide, select or reduce dimensions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.fx import Node

from wildflower.models.traced.layouts import (
    ONE,
    CannotAlignError,
    Layout,
    cut_at,
    fresh,
    is_pinned,
    pin,
    product,
    resolved,
    size_of,
    take_inner,
    unify,
)
from wildflower.models.traced.operators import FOURIER, POOLING, REDUCTION, VIEWS
from wildflower.models.traced.propagation import Found, Layouts, Propagation, arguments, shape_of


def _first(found: Propagation, node: Node) -> Layouts:
    return list(found.of(node.args[0]))  # type: ignore[arg-type]  # a node


def view(found: Propagation, node: Node) -> Layouts:
    """Entries keep their order: dimensions of equal products are divided or joined."""
    before, sizes = [resolved(layout) for layout in _first(found, node)], shape_of(node)
    result: Layouts = []
    start = end = at = to = 0
    while end < len(before) or to < len(sizes):
        start, at = end, to
        have = size_of(before[end]) if end < len(before) else 1
        want = sizes[to] if to < len(sizes) else 1
        end, to = min(end + 1, len(before)), min(to + 1, len(sizes))
        while have != want:
            if have < want:
                have *= size_of(before[end])
                end += 1
            else:
                want *= sizes[to]
                to += 1
        result += _divided(found, before[start:end], sizes[at:to])
    return [resolved(layout) for layout in result]


def _divided(found: Propagation, before: Sequence[Layout], sizes: Sequence[int]) -> Layouts:
    if not sizes:
        return []
    if not before:
        return [ONE] * len(sizes)
    if len(before) == len(sizes) == 1:
        return list(before)
    rest, inner = product(before), []
    for size in reversed(sizes[1:]):
        divided = take_inner(rest, size)
        if divided is None:
            for layout in before:
                pin(layout, "a view takes it apart")
            found.unknown["view"] += 1
            return [found.sized(size, "a view takes it apart") for size in sizes]
        rest, part = divided
        inner.append(part)
    return [rest, *reversed(inner)]


def permute(found: Propagation, node: Node) -> Layouts:
    """Dimensions in another order."""
    layouts = _first(found, node)
    return [layouts[place] for place in arguments(node)["dims"]]


def transpose(found: Propagation, node: Node) -> Layouts:
    """Two dimensions exchanged."""
    layouts = _first(found, node)
    _, one, two = arguments(node).values()
    layouts[one], layouts[two] = layouts[two], layouts[one]
    return layouts


def transposed(found: Propagation, node: Node) -> Layouts:
    """The last two dimensions exchanged."""
    *outer, rows, columns = _first(found, node)
    return [*outer, columns, rows]


def reverse(found: Propagation, node: Node) -> Layouts:
    """All dimensions in reverse order."""
    return _first(found, node)[::-1]


def movedim(found: Propagation, node: Node) -> Layouts:
    """One dimension at another place."""
    layouts, source, to = _first(found, node), node.args[1], node.args[2]
    if not isinstance(source, int) or not isinstance(to, int):
        raise CannotAlignError("it moves several dimensions")
    moved = layouts.pop(source)
    layouts.insert(to if to >= 0 else len(layouts) + 1 + to, moved)
    return layouts


def expand(found: Propagation, node: Node) -> Layouts:
    """Dimensions of size 1 repeated."""
    layouts, sizes = _first(found, node), shape_of(node)
    layouts = [ONE] * (len(sizes) - len(layouts)) + layouts
    why = "it repeats an input" if _is_of_input(found, node) else ""
    return [
        layout
        if size == 1 or size_of(layout) != 1
        else ((found.batch,),)
        if size == found.batch.size
        else fresh(size, why)
        for layout, size in zip(layouts, sizes, strict=True)
    ]


def _is_of_input(found: Propagation, node: Node) -> bool:
    """Say whether a node shows the input alone, such as a gray image that is repeated for each color."""
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        [node] = node.all_input_nodes
    return node.op == "placeholder" and any(map(found.is_batch, found.of(node)[:1]))


def repeat(found: Propagation, node: Node) -> Layouts:
    """Whole dimensions several times, one behind another."""
    layouts, counts = _first(found, node), list(node.args[1])  # type: ignore[arg-type]
    layouts = [ONE] * (len(counts) - len(layouts)) + layouts
    result: Layouts = []
    for layout, count in zip(layouts, [1] * (len(layouts) - len(counts)) + counts, strict=True):
        if count == found.batch.size and size_of(layout) == 1:
            result.append(((found.batch,),))
        else:
            result.append(layout if count == 1 else product([fresh(count, "it is repeated"), layout]))
    return result


def repeat_interleave(found: Propagation, node: Node) -> Layouts:
    """Every entry several times in a row."""
    given = arguments(node)
    layouts, count, dimension = _first(found, node), given.get("repeats"), given.get("dim")
    if not isinstance(count, int) or not isinstance(dimension, int):
        raise CannotAlignError("its counts are a tensor")
    layouts[dimension] = product([layouts[dimension], fresh(count, "it is repeated")])
    return layouts


def concatenate(found: Propagation, node: Node) -> Layouts:
    """One dimension of several tensors, one behind another."""
    given = arguments(node)
    tensors = [found.of(tensor) for tensor in given["tensors"] if shape_of(tensor) != (0,)]
    result = list(tensors[0])
    if not result:
        raise CannotAlignError("it puts numbers together")
    dimension = given.get("dim", 1 if len(result) > 1 else 0) % len(result)  # hstack has none
    for other in tensors[1:]:
        for place, layout in enumerate(result):
            if place != dimension:
                unify(layout, other[place])
    result[dimension] = tuple(segment for layouts in tensors for segment in resolved(layouts[dimension]))
    return [resolved(layout) for layout in result]


def stack(found: Propagation, node: Node) -> Layouts:
    """A new dimension of as many entries as there are tensors."""
    given = arguments(node)
    tensors = [found.of(tensor) for tensor in given["tensors"]]
    for other in tensors[1:]:
        for mine, theirs in zip(tensors[0], other, strict=True):
            unify(mine, theirs)
    result = list(tensors[0])
    result.insert(given["dim"] % (len(result) + 1), fresh(len(tensors), "it counts stacked tensors"))
    return result


def split(found: Propagation, node: Node) -> Found:
    """Parts of one dimension."""
    layouts, dimension = _first(found, node), arguments(node)["dim"]
    dimension %= len(layouts)
    sizes = [part.shape[dimension] for part in node.meta["val"]]
    parts = cut_at(layouts[dimension], [sum(sizes[:place]) for place in range(1, len(sizes))])
    if parts is None:
        pin(layouts[dimension], "it is split")
        parts = [fresh(size, "it is split") for size in sizes]
    return [[*layouts[:dimension], part, *layouts[dimension + 1 :]] for part in parts]


def gated(found: Propagation, node: Node) -> Layouts:
    """The first half of one dimension, times a gate that is the second."""
    layouts, dimension = _first(found, node), arguments(node)["dim"]
    halves = cut_at(layouts[dimension], [size_of(layouts[dimension]) // 2])
    if halves is None:
        raise CannotAlignError("its halves cannot be told")
    unify(*halves)
    layouts[dimension] = resolved(halves[0])
    return layouts


def unbind(found: Propagation, node: Node) -> Found:
    """A tensor per entry of a dimension."""
    layouts, dimension = _first(found, node), arguments(node)["dim"]
    pin(layouts.pop(dimension), "its entries are taken one by one")
    return [list(layouts) for _ in node.meta["val"]]


def select(found: Propagation, node: Node) -> Layouts:
    """One entry of a dimension."""
    layouts = _first(found, node)
    pin(layouts.pop(node.args[1]), "its entries are taken one by one")  # type: ignore[arg-type]
    return layouts


def slices(found: Propagation, node: Node) -> Layouts:
    """A stretch of a dimension."""
    given = arguments(node)
    layouts, dimension = _first(found, node), given["dim"]
    dimension %= len(layouts)
    layout, size, step = layouts[dimension], size_of(layouts[dimension]), given.get("step", 1)
    if "length" in given:  # narrow
        start, end = given["start"], given["start"] + given["length"]
    else:
        start, end = given["start"] or 0, size if given["end"] is None else given["end"]
    start, end, step = slice(start, end, step).indices(size)
    if (start, end, step) == (0, size, 1):
        return layouts
    left = shape_of(node)[dimension]
    parts = None
    if step == 1 and start < end and not is_pinned(layout):
        parts = cut_at(layout, sorted({place for place in (start, end) if 0 < place < size}))
    if parts is None:
        pin(layout, "a part of it is taken")
        layouts[dimension] = fresh(left, "a part of it is taken")
        return layouts
    middle = 1 if start > 0 else 0
    found.details[node] = (parts[0] if middle else (), parts[middle])
    layouts[dimension] = parts[middle]
    return layouts


def reduce(found: Propagation, node: Node) -> Found:
    """Some dimensions left out, or of size 1."""
    given = arguments(node)
    layouts, dimensions = _first(found, node), given.get("dim")
    several = isinstance(node.meta["val"], tuple)
    shape = tuple(node.meta["val"][0].shape) if several else shape_of(node)
    if dimensions is None or dimensions == []:
        dimensions = list(range(len(layouts)))
    left_out = {place % len(layouts) for place in ([dimensions] if isinstance(dimensions, int) else dimensions)}
    if len(shape) == len(layouts):
        result = [ONE if place in left_out else layout for place, layout in enumerate(layouts)]
    else:
        result = [layout for place, layout in enumerate(layouts) if place not in left_out]
    return [list(result) for _ in node.meta["val"]] if several else result


def largest(found: Propagation, node: Node) -> Found:
    """Return for `max` and `min` the largest of all, along a dimension, or of two tensors."""
    given = arguments(node)
    if "other" in given:
        return found.elementwise(node)
    return reduce(found, node) if "dim" in given else []


def pooling(found: Propagation, node: Node) -> Found:
    """Inputs (batch, channels, *sides), with other sides behind."""
    layouts = _first(found, node)

    def result(value: Tensor) -> Layouts:
        sides = value.shape[2:]
        return [*layouts[:2], *(fresh(size, "it is a position") for size in sides)]

    value = node.meta["val"]
    if len(layouts) < 3 or not found.is_batch(layouts[0]):
        raise CannotAlignError("it has no dimension of the batch")
    for side in layouts[2:]:
        pin(side, "it is a position")
    return result(value) if isinstance(value, Tensor) else [result(entry) for entry in value]


def padding(found: Propagation, node: Node) -> Layouts:
    """Entries added at the ends of the last dimensions."""
    layouts, added = _first(found, node), arguments(node)["pad"]
    for place in range(len(added) // 2):
        if added[2 * place] or added[2 * place + 1]:
            dimension = len(layouts) - 1 - place
            pin(layouts[dimension], "it is padded")
            layouts[dimension] = fresh(shape_of(node)[dimension], "it is padded")
    return layouts


def rolled(found: Propagation, node: Node) -> Layouts:
    """Entries of some dimensions in another order."""
    layouts = _first(found, node)
    dimensions = arguments(node)["dims"]
    for place in [dimensions] if isinstance(dimensions, int) else dimensions or range(len(layouts)):
        _change(found, node, layouts, place, "its entries change places")
    return layouts


def summed_up(found: Propagation, node: Node) -> Layouts:
    """Entries of a dimension, each with those before it."""
    layouts = _first(found, node)
    _change(found, node, layouts, arguments(node)["dim"], "its entries are summed up")
    return layouts


def _change(found: Propagation, node: Node, layouts: Layouts, place: int, why: str) -> None:
    """Let nothing of a dimension be cut, nor its entries be those of before: a class's own is not where it was."""
    pin(layouts[place], why)
    if not found.is_batch(layouts[place]):
        layouts[place] = fresh(shape_of(node)[place], why)


def index(found: Propagation, node: Node) -> Layouts:
    """Entries that other tensors name, along dimensions side by side."""
    layouts, indices = _first(found, node), list(node.args[1])  # type: ignore[arg-type]
    at = [place for place, tensor in enumerate(indices) if tensor is not None]
    if at != list(range(at[0], at[0] + len(at))):
        raise CannotAlignError("it indexes dimensions that are not side by side")
    if any(indices[place].meta["val"].dtype == torch.bool for place in at):
        raise CannotAlignError("its index is a mask")
    for place in at:
        if not found.is_batch(layouts[place]):
            pin(layouts[place], "its entries are taken by an index")
    middle = [ONE] * (len(shape_of(node)) - (len(layouts) - len(at)))
    for place in at:
        for position, layout in enumerate(reversed(found.of(indices[place])), start=1):
            if size_of(layout) == 1:
                continue
            if middle[-position] == ONE:
                middle[-position] = resolved(layout)
            else:
                unify(middle[-position], layout)
    return [*layouts[: at[0]], *middle, *layouts[at[-1] + 1 :]]


def index_select(found: Propagation, node: Node) -> Layouts:
    """Entries that a vector names, along one dimension."""
    given = arguments(node)
    layouts, dimension = _first(found, node), given["dim"]
    pin(layouts[dimension], "its entries are taken by an index")
    layouts[dimension] = found.of(given["index"])[0] if found.of(given["index"]) else ONE
    return layouts


def copy(found: Propagation, node: Node) -> Layouts:
    """The second tensor written over the first."""
    found.elementwise(node)
    return _first(found, node)


def pixel_shuffle(found: Propagation, node: Node) -> Layouts:
    """Channels are (channels, factor, factor), and become positions."""
    layouts, factor = _first(found, node), int(arguments(node)["upscale_factor"])
    divided = take_inner(layouts[-3], factor * factor)
    if divided is None:
        raise CannotAlignError("its channels cannot be divided")
    pin(divided[1], "it becomes positions")
    return [*layouts[:-3], divided[0], *(fresh(size, "it is a position") for size in shape_of(node)[-2:])]


def pixel_unshuffle(found: Propagation, node: Node) -> Layouts:
    """Positions become channels: (channels, factor, factor)."""
    layouts, factor = _first(found, node), int(arguments(node)["downscale_factor"])
    for side in layouts[-2:]:
        pin(side, "it is a position")
    channels = product([layouts[-3], fresh(factor * factor, "it is a position")])
    return [*layouts[:-3], channels, *(fresh(size, "it is a position") for size in shape_of(node)[-2:])]


def fourier(found: Propagation, node: Node) -> Layouts:
    """Frequencies in place of positions, along some dimensions."""
    layouts, options = _first(found, node), arguments(node)
    given, sizes = options["dim"], options.get("s")
    every = range(len(layouts)) if sizes is None else range(-len(sizes), 0)
    for place in every if given is None else [given] if isinstance(given, int) else given:
        pin(layouts[place], "it is transformed")
        layouts[place] = fresh(shape_of(node)[place], "it is transformed")
    return layouts


def as_complex(found: Propagation, node: Node) -> Layouts:
    """The last dimension holds the two parts of each number."""
    layouts = _first(found, node)
    pin(layouts.pop(), "it holds the parts of complex numbers")
    return layouts


def as_real(found: Propagation, node: Node) -> Layouts:
    """The two parts of each number in a last dimension."""
    return [*_first(found, node), fresh(2, "it holds the parts of complex numbers")]


def broadcast(found: Propagation, node: Node) -> Found:
    """Several tensors, repeated to one shape."""
    return [found.elementwise(node) for _ in node.meta["val"]]


def normal(found: Propagation, node: Node) -> Layouts:
    """Numbers drawn for tensors of means and deviations, or of a size."""
    if found.tensors_of(node):
        return found.elementwise(node)
    return [found.sized(size, "it counts numbers that are drawn") for size in shape_of(node)]


def channel_shuffle(found: Propagation, node: Node) -> Layouts:
    """Channels are (groups, channels of a group), and change places."""
    layouts, groups = _first(found, node), int(arguments(node)["groups"])
    divided = take_inner(layouts[1], size_of(layouts[1]) // groups)
    if divided is None:
        raise CannotAlignError("its channels cannot be divided")
    pin(divided[0], "it counts groups that change places")
    layouts[1] = product([divided[1], divided[0]])
    return layouts


SHAPE_RULES: Mapping[str, Callable[[Propagation, Node], Found]] = {
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(("transpose", "transpose_", "swapaxes", "swapdims"), transpose),
    **dict.fromkeys(("t", "numpy_T", "matrix_H"), reverse),
    **dict.fromkeys(("mT", "mH", "adjoint"), transposed),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), expand),
    **dict.fromkeys(("cat", "concat", "concatenate", "hstack"), concatenate),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unsafe_chunk", "tensor_split"), split),
    **dict.fromkeys(FOURIER, fourier),
    **dict.fromkeys(("slice", "narrow"), slices),
    **dict.fromkeys(REDUCTION, reduce),
    **dict.fromkeys(("max", "min"), largest),
    **dict.fromkeys(POOLING, pooling),
    **dict.fromkeys(("pad", "constant_pad_nd"), padding),
    **dict.fromkeys(("roll", "flip"), rolled),
    "cumsum": summed_up,
    "glu": gated,
    "permute": permute,
    **dict.fromkeys(("movedim", "moveaxis"), movedim),
    **dict.fromkeys(("repeat", "tile"), repeat),
    "repeat_interleave": repeat_interleave,
    "stack": stack,
    "unbind": unbind,
    "select": select,
    "index": index,
    "index_select": index_select,
    "copy_": copy,
    "pixel_shuffle": pixel_shuffle,
    "pixel_unshuffle": pixel_unshuffle,
    "view_as_complex": as_complex,
    "view_as_real": as_real,
    "broadcast_tensors": broadcast,
    "channel_shuffle": channel_shuffle,
    "normal": normal,
}
