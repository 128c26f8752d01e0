"""Rules for layers: convolutions, linear layers, norms, attention, embeddings, recurrent layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from torch.fx import Node

from wildflower.models.traced.layouts import (
    ONE,
    CannotAlignError,
    Layout,
    fresh,
    pin,
    product,
    resolved,
    size_of,
    take_inner,
    unify,
)
from wildflower.models.traced.operators import CONVOLUTIONS, short_name
from wildflower.models.traced.propagation import Found, Layouts, Propagation, arguments, shape_of

GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def convolution(found: Propagation, node: Node) -> Layouts:
    """Inputs (batch, in, *sides), weight (out, in / groups, *sides), or (in, out / groups, *sides) if transposed."""
    given = arguments(node)
    inputs, weight = found.of(given["input"]), found.of(given["weight"])
    transposed, groups = "transpose" in short_name(node.target), given["groups"]
    if len(inputs) != len(weight):
        raise CannotAlignError("it has no dimension of the batch")
    for side in weight[2:]:
        pin(side, "it is a side of a kernel")
    into, out = (weight[0], weight[1]) if transposed else (weight[1], weight[0])
    if groups == 1:
        unify(inputs[1], into)
    else:
        of_groups = fresh(groups)
        if transposed:
            unify(into, product([of_groups, fresh(size_of(into) // groups)]))
            unify(inputs[1], into)
            out = product([of_groups, out])
        else:
            unify(inputs[1], product([of_groups, into]))
            unify(out, product([of_groups, fresh(size_of(out) // groups)]))
        found.details[node] = of_groups
    if given["bias"] is not None:
        unify(found.of(given["bias"])[0], out)
    return [inputs[0], resolved(out), *(fresh(size, "it is a position") for size in shape_of(node)[2:])]


def linear(found: Propagation, node: Node) -> Layouts:
    """Inputs (..., in), weight (out, in)."""
    given = arguments(node)
    inputs, weight = found.of(given["input"]), found.of(given["weight"])
    unify(inputs[-1], weight[1])
    if given["bias"] is not None:
        unify(found.of(given["bias"])[0], weight[0])
    return [*inputs[:-1], weight[0]]


def _product_of_matrices(first: Layouts, second: Layouts) -> Layouts:
    unify(first[-1], second[-2] if len(second) > 1 else second[-1])
    if len(second) == 1:
        return first[:-1]
    if len(first) == 1:
        return [*second[:-2], second[-1]]
    count = max(len(first), len(second)) - 2
    outer = []
    for place in range(-count - 2, -2):
        one = resolved(first[place]) if -place <= len(first) else ONE
        two = resolved(second[place]) if -place <= len(second) else ONE
        if ONE not in (one, two):
            unify(one, two)
        outer.append(two if one == ONE else one)
    return [*outer, first[-2], second[-1]]


def matmul(found: Propagation, node: Node) -> Layouts:
    """(..., rows, inner) times (..., inner, columns)."""
    first, second = node.args[:2]
    return _product_of_matrices(found.of(first), found.of(second))  # type: ignore[arg-type]


def addmm(found: Propagation, node: Node) -> Layouts:
    """The first argument, which is broadcast, and the product of the others."""
    bias, first, second = (found.of(argument) for argument in node.args[:3])  # type: ignore[arg-type]
    result = _product_of_matrices(first, second)
    for place in range(1, len(bias) + 1):
        if size_of(bias[-place]) > 1:
            unify(bias[-place], result[-place])
    return result


def einsum(found: Propagation, node: Node) -> Layouts:
    """Dimensions of one letter are one; those of an ellipsis are broadcast."""
    terms, arrow, result = str(node.args[0]).replace(" ", "").partition("->")
    of: dict[str, Layout] = {}
    seen: Counter[str] = Counter()
    for term, tensor in zip(terms.split(","), node.args[1], strict=True):  # type: ignore[arg-type]
        layouts = found.of(tensor)
        for letter, layout in zip(_letters(term, len(layouts) - len(term.replace(".", ""))), layouts, strict=True):
            seen[letter] += 1
            if letter in of and 1 not in (size_of(of[letter]), size_of(layout)):
                unify(of[letter], layout)
            elif size_of(of.get(letter, ONE)) == 1:
                of[letter] = layout
    ellipsis = sum(letter.isdigit() for letter in of)
    if not arrow:
        result = "..." * (ellipsis > 0) + "".join(sorted(x for x, times in seen.items() if times == 1 and x.isalpha()))
    return [resolved(of[letter]) for letter in _letters(result, ellipsis)]


def _letters(term: str, ellipsis: int) -> list[str]:
    """Return a name for each dimension of a term; those of an ellipsis are numbered from the last one."""
    before, dots, behind = term.partition("...")
    return [*before, *(str(number) for number in range(ellipsis if dots else 0, 0, -1)), *behind]


def norm_of_channels(found: Propagation, node: Node) -> Layouts:
    """Inputs (batch, channels, ...); weight, bias and statistics have one entry per channel."""
    given = arguments(node)
    inputs = found.of(given["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if given.get(name) is not None:
            unify(inputs[1], found.of(given[name])[0])
    return list(inputs)


def norm_of_last(found: Propagation, node: Node) -> Layouts:
    """Inputs (..., *normalized); weight and bias have the shape of the last dimensions."""
    given = arguments(node)
    inputs = found.of(given["input"])
    last = inputs[len(inputs) - len(given["normalized_shape"]) :]
    for name in ("weight", "bias"):
        if given.get(name) is not None:
            for mine, other in zip(last, found.of(given[name]), strict=True):
                unify(mine, other)
    return list(inputs)


def group_norm(found: Propagation, node: Node) -> Layouts:
    """Channels are (groups, channels of a group)."""
    given, inputs = arguments(node), norm_of_channels(found, node)
    groups = fresh(given["num_groups"])
    divided = take_inner(inputs[1], size_of(inputs[1]) // given["num_groups"])
    if divided is None:
        pin(inputs[1], "groups of a norm")
        pin(groups, "groups of a norm")
    else:
        unify(groups, divided[0])
    found.details[node] = groups
    return inputs


def prelu(found: Propagation, node: Node) -> Layouts:
    """One weight, or one per channel."""
    inputs, weight = (found.of(argument) for argument in node.args[:2])  # type: ignore[arg-type]
    if weight and size_of(weight[0]) > 1:
        unify(inputs[1], weight[0])
    return list(inputs)


def attention(found: Propagation, node: Node) -> Layouts:
    """Queries (..., positions, size), keys and values (..., read positions, size)."""
    given = arguments(node)
    queries, keys, values = (found.of(given[name]) for name in ("query", "key", "value"))
    outer = len(queries) - 2
    for place in range(outer):
        mine, other = resolved(queries[place]), resolved(keys[place])
        if given.get("enable_gqa") and place == outer - 1 and size_of(mine) != size_of(other):
            unify(mine, product([other, fresh(size_of(mine) // size_of(other))]))
            unify(keys[place], values[place])
            continue
        unify(mine, other)
        unify(queries[place], values[place])
    unify(queries[-1], keys[-1])
    unify(keys[-2], values[-2])
    if given["attn_mask"] is not None:
        sides = [keys[-2], queries[-2], *reversed(queries[:-2])]
        for layout, side in zip(reversed(found.of(given["attn_mask"])), sides, strict=False):
            if size_of(layout) > 1:
                unify(layout, side)
    return [*queries[:-1], values[-1]]


def embedding(found: Propagation, node: Node) -> Layouts:
    """A row of the table per token."""
    table, tokens = (found.of(argument) for argument in node.args[:2])  # type: ignore[arg-type]
    pin(table[0], "it counts the rows of a table")
    return [*tokens, table[1]]


def recurrent(found: Propagation, node: Node) -> Found:
    """LSTM, GRU and plain cells: hidden sizes of all layers are one, because their first states are one tensor."""
    given = arguments(node)
    if "data" in given:
        raise CannotAlignError("its sequences are packed")
    states = given["hx"] if isinstance(given["hx"], list | tuple) else [given["hx"]]
    inputs, weights = found.of(given["input"]), given["params"]
    per_cell, directions = (4 if given["has_biases"] else 2), (2 if given["bidirectional"] else 1)
    if shape_of(weights[1])[1] * GATES[short_name(node.target)] != shape_of(weights[1])[0]:
        raise CannotAlignError("its outputs are projected")
    hidden = fresh(shape_of(weights[1])[1])
    read = inputs[2]
    for layer in range(given["num_layers"]):
        for direction in range(directions):
            first = (layer * directions + direction) * per_cell
            of_inputs, of_hidden, *biases = (found.of(weight) for weight in weights[first : first + per_cell])
            unify(of_inputs[1], read)
            unify(of_hidden[1], hidden)
            for rows in (of_inputs[0], of_hidden[0], *(bias[0] for bias in biases)):
                unify(rows, resolved(hidden) * GATES[short_name(node.target)])
        read = resolved(hidden) * directions
    results = [found.of(state) for state in states]
    for state in results:
        unify(state[2], hidden)
        unify(state[1], inputs[0 if given["batch_first"] else 1])
    return [[inputs[0], inputs[1], read], *map(list, results)]


def cell(found: Propagation, node: Node) -> Found:
    """One step of an LSTM, a GRU or a plain cell."""
    given = arguments(node)
    inputs, of_inputs, of_hidden = (found.of(given[name]) for name in ("input", "w_ih", "w_hh"))
    several = isinstance(given["hx"], list | tuple)
    states = [found.of(state) for state in (given["hx"] if several else [given["hx"]])]
    gates = GATES[short_name(node.target).removesuffix("_cell")]
    unify(of_inputs[1], inputs[-1])
    for state in states:
        unify(state[-1], of_hidden[1])
    biases = [found.of(given[name]) for name in ("b_ih", "b_hh") if given[name] is not None]
    for rows in (of_inputs[0], of_hidden[0], *(bias[0] for bias in biases)):
        unify(rows, resolved(of_hidden[1]) * gates)
    result = [*inputs[:-1], resolved(of_hidden[1])]
    return [list(result) for _ in states] if several else result


def bag(found: Propagation, node: Node) -> Found:
    """The sum or mean of the rows of a table, for each bag of tokens."""
    given = arguments(node)
    table = found.of(given["weight"])
    pin(table[0], "it counts the rows of a table")
    made, *others = node.meta["val"]
    rest = [[fresh(size, "it counts tokens") for size in value.shape] for value in others]
    return [[found.sized(made.shape[0], "it counts bags"), table[1]], *rest]


def dot(found: Propagation, node: Node) -> Layouts:
    """The sum over the one dimension of both."""
    first, second = (found.of(argument) for argument in node.args[:2])  # type: ignore[arg-type]
    unify(first[0], second[0])
    return []


LAYER_RULES: Mapping[str, Callable[[Propagation, Node], Found]] = {
    **dict.fromkeys(CONVOLUTIONS, convolution),
    **dict.fromkeys(("matmul", "mm", "bmm", "mv"), matmul),
    **dict.fromkeys(("addmm", "baddbmm"), addmm),
    **dict.fromkeys(("batch_norm", "instance_norm"), norm_of_channels),
    **dict.fromkeys(("layer_norm", "rms_norm"), norm_of_last),
    **dict.fromkeys(GATES, recurrent),
    **dict.fromkeys((f"{kind}_cell" for kind in GATES), cell),
    "linear": linear,
    "embedding_bag": bag,
    "einsum": einsum,
    "group_norm": group_norm,
    "prelu": prelu,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    **dict.fromkeys(("dot", "vdot"), dot),
}
