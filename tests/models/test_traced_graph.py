"""A graph from the wire: what it may not hold is refused before anything is computed."""

import base64
import json
import subprocess
import sys
import zlib

import pytest
import torch

from wildflower.models.family import make_family
from wildflower.models.traced.graph import Constant, read_graph
from wildflower.models.traced.guarded import function_named
from wildflower.models.traced.operators import ALLOWED, FRESH, operator_named

SPEC = {"name": "own_traced:Dense", "input_shape": [1, 8, 8], "classes": 7}


@pytest.fixture(scope="module")
def spec():
    return make_family(SPEC).spec()


def opened(spec):
    return json.loads(zlib.decompress(base64.b64decode(spec["graph"])))


def closed(graph):
    return base64.b64encode(zlib.compress(json.dumps(graph).encode())).decode()


def with_change(spec, change):
    graph = opened(spec)
    change(graph)
    return spec | {"graph": closed(graph)}


def set_op(op):
    return lambda graph: graph["training"][0].update(op=op)


def set_argument(value):
    return lambda graph: graph["training"][0]["args"].__setitem__(0, value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_op("system.default"), r"training, node 0 .*: the operator 'system.default' is none that a graph may hold"),
        (set_op("from_file.default"), "is none that a graph may hold"),
        (set_op("set_.default"), "is none that a graph may hold"),
        (set_op("linear.__class__"), "does not exist|is none that a graph may hold"),
        (set_op("linear"), "is none that a graph may hold"),
        (set_argument({"n": 0}), "reads the result of node 0, which is not in front of it"),
        (set_argument({"t": "nothing"}), "reads the tensor 'nothing', which is missing"),
        (set_argument({"s": [[2**40]]}), "no size that is allowed"),
        (set_argument({"s": [[1, 99]]}), "is no size"),
        (set_argument({"d": "object"}), "no type that a graph may hold"),
        (set_argument({"call": "os.system"}), "is no argument"),
        (set_argument([[[[[[[[1]]]]]]]]), "lists lie in one another"),
        (set_argument(2**70), "too large"),
        (lambda graph: graph["groups"].update(more=2**40), "not well-formed: groups.more"),
        (lambda graph: graph["state"]["head.weight"]["dimensions"][0][0].update(after=2**30), "not well-formed"),
        (
            lambda graph: graph["state"]["head.weight"]["dimensions"].extend([[{"after": 2**24}]] * 2),
            "more than .* entries",
        ),
        (lambda graph: graph["state"]["head.weight"]["dimensions"][0][0].update(group=5), "cut by a group"),
        (lambda graph: graph.update(code="import os"), "not well-formed: code"),
        (lambda graph: graph.update(training=[]), "not well-formed: training"),
        (lambda graph: graph.update(ties={"x": "y"}), "to which another is tied, is missing"),
        (
            lambda graph: graph.update(constants={"c": {"shape": [2**20, 2**10], "dtype": "float32", "data": ""}}),
            "a constant has .* bytes, at most",
        ),
    ],
)
def test_what_a_graph_may_not_hold_is_refused(spec, change, words):
    with pytest.raises(ValueError, match=words):
        make_family(with_change(spec, change))


@pytest.mark.parametrize("text", ["", "%%%", base64.b64encode(b"no zip").decode(), closed([1, 2])])
def test_what_is_no_graph_is_refused(spec, text):
    with pytest.raises(ValueError, match=r"it is not what was packed|not well-formed"):
        make_family(spec | {"graph": text})


def test_a_bomb_is_not_unpacked():
    bomb = base64.b64encode(zlib.compress(b" " * 2**27)).decode()
    with pytest.raises(ValueError, match="more than 67,108,864 bytes"):
        read_graph(bomb)


def test_a_result_without_bounds_is_refused_before_it_is_computed(spec):
    def grow(graph):
        shape = [{"x": 0}, [2**12, 2**12, 64, 64]]
        graph["evaluation"].insert(0, {"op": "repeat.default", "args": shape})
        for node in graph["evaluation"][1:]:
            node["args"] = [
                {"n": value["n"] + 1} if isinstance(value, dict) and "n" in value else value for value in node["args"]
            ]

    with pytest.raises(ValueError, match=r"evaluation, node 0 .*its result has more than .* entries"):
        make_family(with_change(spec, grow))


@pytest.mark.parametrize(
    ("op", "args", "words"),
    [
        ("tile.default", [{"x": 0}, [2**12, 2**12, 64, 64]], "more than .* entries"),
        ("normal.float_float", [0.0, 1.0, [2**24, 2**12]], "more than .* entries"),
        ("fft_fft2.default", [{"x": 0}, [2**24, 2**12]], "more than .* entries"),
        ("replication_pad2d.default", [{"x": 0}, [2**24] * 4], "more than .* entries"),
        ("eye.default", [2**24], "more than .* entries"),
        ("tril_indices.default", [2**24, 2**24], "more than .* entries"),
        ("diag_embed.default", [{"x": 0}, 2**20], "more than .* entries"),
        ("arange.default", [1e15], "more than .* entries"),
        ("arange.start_step", [0, 2**24, 1e-9], "more than .* entries"),
        ("arange.default", [], "its arguments are none that it takes"),
        ("one_hot.default", [{"x": 0}, 2**40], "is larger than"),
    ],
)
def test_a_result_larger_than_any_is_refused(spec, op, args, words):
    def put(graph):
        graph["training"][0] = {"op": op, "args": args}

    with pytest.raises(ValueError, match=f"training, node 0 .*{words}"):
        make_family(with_change(spec, put))


X, WEIGHT = {"x": 0}, {"t": "head.weight"}
LAST = {"n": 0}  # of the nodes that are put in front


def with_nodes(spec, nodes, mode="evaluation", **more):
    def change(graph):
        graph[mode] = [{"op": op, "args": list(args)} for op, *args in nodes]
        graph.update({"blocks": {}, "bypassed": {}, "stacks": {}} | more)

    return with_change(spec, change)


@pytest.mark.parametrize(
    ("nodes", "changed"),
    [
        ([("relu_.default", X)], "its input"),
        ([("flatten.using_ints", X), ("add_.Scalar", LAST, 1)], "its input"),
        ([("dropout.default", X, 0.5, False), ("zero_.default", LAST)], "its input"),
        ([("einsum.default", "abcd->dcba", [X]), ("zero_.default", LAST)], "its input"),
        ([("split.Tensor", X, 1), ("getitem", LAST, 0), ("zero_.default", {"n": 1})], "its input"),
        ([("lstm.input", X, [X, X], [], False, 0, 0.0, False, False, True), ("getitem", LAST, 0)], "its input"),
        ([("copy_.default", WEIGHT, X)], "head.weight"),
        ([("relu.default", X), ("mul.out", LAST, LAST), ("mul.out", LAST, LAST, X)], "its input"),
        ([("detach.default", WEIGHT), ("fill_.Scalar", LAST, 0.0)], "head.weight"),
        ([("mT.default", WEIGHT), ("index_put_.default", LAST, [X], X)], "head.weight"),
        ([("batch_norm.default", X, None, None, WEIGHT, WEIGHT, True, 0.1, 1e-5, False)], "head.weight"),
        ([("instance_norm.default", X, None, None, X, X, True, 0.1, 1e-5, False)], "its input"),
    ],
)
@pytest.mark.parametrize("mode", ["training", "evaluation"])
def test_a_graph_that_writes_into_the_batch_or_a_parameter_is_refused(spec, nodes, changed, mode):
    last = [("relu_.default", {"n": len(nodes) - 1})]
    with pytest.raises(ValueError, match=f"{mode}, node .*: it changes {changed} in place"):
        make_family(with_nodes(spec, [*nodes, *last], mode))


def test_what_stands_for_a_block_that_is_left_out_is_not_written_into(spec):
    """With the block the result is new memory, and without it the batch itself."""
    nodes = [("relu.default", X), ("zero_.default", LAST)]
    assert make_family(with_nodes(spec, nodes))
    blocks = {"blocks": {"layer": [next(iter(opened(spec)["groups"]))]}, "bypassed": {"layer": [[0, -1], [0, -1]]}}
    with pytest.raises(ValueError, match=r"evaluation, node 1 .*: it changes its input in place"):
        make_family(with_nodes(spec, nodes, **blocks))


def test_of_two_blocks_with_one_result_each_may_be_left_out(spec):
    """In place of the last one's result is new memory, in place of the first one's the batch."""
    nodes = [("relu.default", X), ("relu.default", LAST), ("zero_.default", {"n": 1})]
    first, second = list(opened(spec)["groups"])[:2]
    blocks = {"first": [first], "second": [second]}
    assert make_family(with_nodes(spec, nodes, blocks=blocks, bypassed={"first": [[1, 0]] * 2, "second": [[1, 0]] * 2}))
    bypassed = {"first": [[1, -1]] * 2, "second": [[1, 0]] * 2}
    with pytest.raises(ValueError, match=r"evaluation, node 2 .*: it changes its input in place"):
        make_family(with_nodes(spec, nodes, blocks=blocks, bypassed=bypassed))


@pytest.mark.parametrize("op", ["add_.t", "sort.int"])
def test_an_operator_that_changes_a_list_is_refused(spec, op):
    with pytest.raises(ValueError, match="changes a list"):
        make_family(with_change(spec, set_op(op)))


def test_results_and_buffers_may_be_written_into(spec):
    def mark(graph):
        graph["state"]["head.bias"]["kind"] = "buffer"

    written = [
        ("copy_.default", {"t": "head.bias"}, {"t": "head.bias"}),
        ("linear.default", X, WEIGHT),
        ("add_.Tensor", {"n": 1}, WEIGHT),
        ("slice.Tensor", {"n": 2}, 0, 0, 1),
        ("relu_.default", {"n": 3}),
        ("einsum.default", "abcd,ef->abf", [X, WEIGHT]),
        ("relu_.default", {"n": 5}),
        ("index.Tensor", WEIGHT, [X]),
        ("add_.Tensor", {"n": 7}, WEIGHT),
        ("batch_norm.default", X, None, None, WEIGHT, WEIGHT, False, 0.1, 1e-5, False),
    ]
    assert make_family(with_nodes(with_change(spec, mark), written))


def test_memory_that_was_not_written_is_zero():
    for op, arguments in (("empty.memory_format", [[1000]]), ("new_empty.default", [torch.ones(1), [1000]])):
        torch.full((1000,), 7.0)  # whose memory is free again
        assert not function_named(op)(*arguments).any()
    torch.full((1000,), 7.0)
    assert not function_named("empty_like.default")(torch.ones(1000)).any()


SCALAR, ROW, NONE = torch.ones(1, 1), torch.ones(1), torch.zeros(1, dtype=torch.int64)
NEW = {
    "cat": [[SCALAR]],
    "clone": [SCALAR],
    "column_stack": [[SCALAR]],
    "constant_pad_nd": [SCALAR, [0, 0]],
    "cumsum": [SCALAR, 0],
    "flip": [SCALAR, []],
    "hstack": [[SCALAR]],
    "index": [SCALAR, [NONE]],
    "index_add": [SCALAR, 0, NONE[:0], SCALAR[:0]],
    "index_copy": [SCALAR, 0, NONE[:0], SCALAR[:0]],
    "index_fill": [SCALAR, 0, NONE[:0], 1.0],
    "index_put": [SCALAR, [NONE], SCALAR],
    "masked_select": [ROW, ROW > 0],
    "nan_to_num": [SCALAR],
    "outer": [ROW, ROW],
    "pad": [SCALAR, [0, 0]],
    "reflection_pad1d": [SCALAR, [0, 0]],
    "repeat": [SCALAR, [1, 1]],
    "replication_pad1d": [SCALAR, [0, 0]],
    "roll": [SCALAR, [0], [0]],
    "scatter": [SCALAR, 0, NONE[None, :0], SCALAR],
    "scatter_add": [SCALAR, 0, NONE[None, :0], SCALAR],
    "softmax": [SCALAR, 0],
    "sort": [SCALAR],
    "sum": [SCALAR],
    "tensordot": [SCALAR, SCALAR, [1], [0]],
    "tile": [SCALAR, [1]],
    "topk": [SCALAR, 1],
    "vstack": [[SCALAR]],
}


def shares(result, *given):
    return result.untyped_storage().data_ptr() in [each.untyped_storage().data_ptr() for each in given]


@pytest.mark.parametrize(("name", "arguments"), (NEW).items())
def test_new_memory_is_new_where_nothing_is_computed(name, arguments):
    assert name in FRESH
    result = getattr(torch.ops.aten, name)(*arguments)
    assert not shares(result[0] if isinstance(result, tuple) else result, SCALAR, ROW)


@pytest.mark.parametrize("equation", ["ij,jk->ik", "ij,j->ij", "ij,->ij", "ij,ij->ij", "i,j->ij", "i,i->i", ",->"])
def test_a_product_by_einsum_is_new_memory(equation):
    given = [torch.ones([1] * len(letters)) for letters in equation.partition("->")[0].split(",")]
    assert not shares(torch.ops.aten.einsum(equation, given), *given)


def test_constants_come_back_to_the_bit():
    for tensor in (
        torch.randn(3, 4),
        torch.arange(5),
        torch.tensor(True),
        torch.empty(0, 2),
        torch.randn(2).bfloat16(),
    ):
        found = Constant.of(tensor).tensor()
        assert found.dtype == tensor.dtype
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)
    wrong = Constant.of(torch.arange(5)).model_copy(update={"shape": [6]})
    with pytest.raises(ValueError, match="has 40 bytes, not 48"):
        wrong.tensor()


def test_offsets_do_not_lead_out_of_a_bags_indices():
    table, indices = torch.rand(20, 4), torch.arange(10)
    for op in ("embedding_bag.default", "embedding_bag.padding_idx"):
        more = [False, 0, False, None, False, None] if op.endswith("x") else []
        bag, plain = function_named(op), operator_named(op)
        fine = torch.tensor([0, 3, 3, 8])
        assert torch.equal(bag(table, indices, fine, *more)[0], plain(table, indices, fine, *more)[0])
        outside = bag(table, indices, torch.tensor([0, -3, 99]), *more)[0]
        assert torch.equal(outside, plain(table, indices, torch.tensor([0, 0, 10]), *more)[0])


def test_shapes_that_pytorch_does_not_check_are_checked():
    weights = [torch.rand(shape) for shape in ((20, 4), (20, 5), (20,), (20,))]
    rest = (True, 1, 0.0, False, False, True)
    states = [torch.rand(1, 3, 5)] * 2
    lstm = function_named("lstm.input")
    assert lstm(torch.rand(3, 2, 4), states, weights, *rest)[0].shape == (3, 2, 5)
    wrong = [(states, [weight[:8] for weight in weights]), ([torch.rand(1, 1, 5)] * 2, weights)]
    wrong.append((states, [*weights[:2], torch.rand(1), torch.rand(1)]))
    for hx, params in wrong:
        with pytest.raises(ValueError, match="lstm: its weights or states are not those of 1 layers of 5 channels"):
            lstm(torch.rand(3, 2, 4), hx, params, *rest)
    norm = function_named("_weight_norm.default")
    assert norm(torch.rand(6, 3), torch.rand(6, 1), 0).shape == (6, 3)
    with pytest.raises(ValueError, match="1 lengths are not those of dimension 0"):
        norm(torch.rand(6, 3), torch.rand(1, 1), 0)


def test_all_operators_are_pytorchs():
    known = [name for name in ALLOWED if hasattr(torch.ops.aten, name)]
    assert len(known) > 0.97 * len(ALLOWED)
    operator_named("conv2d.default")


def test_a_device_loads_neither_tracer_nor_the_users_code(spec):
    code = (
        "import json, sys, torch\n"
        "from wildflower.models.family import make_family\n"
        "family = make_family(json.loads(sys.stdin.read()))\n"
        "family.build(family.width(0.5))(torch.zeros(2, 1, 8, 8))\n"
        "wrong = [m for m in ('torch.export._trace', 'torch._dynamo', 'own_traced', 'wildflower.models.traced.tracing',"
        " 'wildflower.models.traced.writing') if m in sys.modules]\n"
        "assert not wrong, wrong\n"
    )
    subprocess.run([sys.executable, "-c", code], input=json.dumps(spec), text=True, check=True)
