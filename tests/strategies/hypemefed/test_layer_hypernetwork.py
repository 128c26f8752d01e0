import pytest
import torch

from benchmarks.hypemefed.hypernetworks import FullHypernetwork
from wildflower.strategies.hypemefed.layer_hypernetwork import (
    LowRankHypernetwork,
    Reading,
    as_matrix,
    as_weight,
    factorize,
    fit,
    generate,
    matrix_shape,
)

SHAPES = [(4, 3), (4, 3, 5), (4, 3, 3, 3), (2, 3, 5, 5)]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_comes_back_from_its_matrix(shape):
    weight = torch.randn(shape)
    matrix = as_matrix(weight)
    assert matrix.shape == matrix_shape(shape)
    assert torch.equal(as_weight(matrix, shape), weight)


def test_a_kernels_rows_go_with_the_outputs():
    weight = torch.arange(2 * 3 * 2 * 2).reshape(2, 3, 2, 2)
    # Row (output 1, kernel row 0): its inputs' first kernel rows, side by side.
    assert as_matrix(weight)[2].tolist() == [12, 13, 16, 17, 20, 21]


def test_factors_by_hand():
    """M = 3 u v^T with u = (0, -1), v = (1, 0): the left vector's largest entry is made positive."""
    left, right = factorize(torch.tensor([[0.0, 0.0], [-3.0, 0.0]]), rank=1)
    torch.testing.assert_close(left, torch.tensor([[0.0, 3**0.5]]))
    torch.testing.assert_close(right, torch.tensor([[-(3**0.5), 0.0]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_all_factors_together_are_the_weight(shape):
    weight = torch.randn(shape)
    left, right = factorize(weight, rank=1000)
    torch.testing.assert_close(as_weight(left.T @ right, shape), weight, rtol=1e-4, atol=1e-5)


def test_fewer_factors_are_the_nearest_weight_of_that_rank():
    weight = torch.randn(8, 6)
    singular = torch.linalg.svdvals(weight)
    left, right = factorize(weight, rank=2)
    # Eckart and Young: what is missing has the size of the other singular values.
    torch.testing.assert_close((weight - left.T @ right).norm(), singular[2:].norm())


def test_the_entry_of_largest_size_in_every_left_vector_is_positive():
    torch.manual_seed(1)
    for _ in range(50):
        left, _ = factorize(torch.randn(8, 4, 3, 3), rank=12)
        largest = left.gather(1, left.abs().argmax(dim=1, keepdim=True))
        assert (largest > 0).all()


def test_equal_weights_have_equal_factors_whatever_signs_the_routine_chose(monkeypatch):
    weight = torch.randn(16, 8, 3, 3)
    left, right = factorize(weight, 5)
    routine = torch.linalg.svd

    def turned(matrix, full_matrices):
        u, s, vt = routine(matrix, full_matrices=full_matrices)
        signs = 1.0 - 2.0 * (torch.arange(len(s)) % 2)
        return u * -signs, s, -signs.unsqueeze(1) * vt

    monkeypatch.setattr(torch.linalg, "svd", turned)
    again = factorize(weight, 5)
    assert torch.equal(again[0], left)
    assert torch.equal(again[1], right)


def test_parameters_by_hand_do_not_depend_on_the_rank_of_a_source_that_has_enough():
    # rows 4 * 3 = 12, columns 2 * 3 = 6, target rows 8 * 3 = 24, columns 4 * 3 = 12, hidden 5:
    # (12 * 5 + 5 + 5 * 24 + 24) + (6 * 5 + 5 + 5 * 12 + 12) = 209 + 107
    for rank in (1, 4):
        network = LowRankHypernetwork((4, 2, 3, 3), (8, 4, 3, 3), rank, hidden=5)
        assert sum(p.numel() for p in network.parameters()) == 316
    # (72 * 5 + 5) + (5 * 288 + 288)
    naive = FullHypernetwork((4, 2, 3, 3), (8, 4, 3, 3), hidden=5)
    assert sum(p.numel() for p in naive.parameters()) == 2093


def test_a_source_of_low_rank_makes_targets_of_any_rank():
    # The source is a 12 x 3 matrix, the target 24 x 12: of k = 9 vectors, three come from each of the source's.
    network = LowRankHypernetwork((4, 1, 3, 3), (8, 4, 3, 3), rank=9, hidden=5)
    assert network.times == 3
    guess = as_matrix(generate(network, network.prepare(torch.randn(4, 1, 3, 3))))
    assert torch.linalg.matrix_rank(guess) > 3
    assert LowRankHypernetwork((4, 1, 3, 3), (8, 4, 3, 3), rank=3, hidden=5).times == 1
    # 12 of 16 vectors: near enough. 12 of 20: two of each.
    assert LowRankHypernetwork((4, 4, 3, 3), (16, 16, 3, 3), rank=16, hidden=5).times == 1
    assert LowRankHypernetwork((4, 4, 3, 3), (16, 16, 3, 3), rank=20, hidden=5).times == 2


def test_the_output_by_hand():
    """Identity layers: MLP(x) = relu(x), so that W' = relu(left)^T relu(right)."""
    network = LowRankHypernetwork((2, 2), (2, 2), rank=2, hidden=2)
    for mlp in (network.left, network.right):
        for layer in (mlp[0], mlp[2]):
            with torch.no_grad():
                layer.weight.copy_(torch.eye(2))
                layer.bias.zero_()
    # diag(4, 1): factors 2 e1, 1 e2 on both sides, all positive: comes back as it is.
    weight = torch.diag(torch.tensor([4.0, 1.0]))
    torch.testing.assert_close(generate(network, network.prepare(weight)), weight)
    # -diag(4, 1): the left vectors are made positive, so the right ones are negative, and relu takes them away.
    assert not generate(network, network.prepare(-weight)).any()


def test_a_vector_is_a_matrix_of_one_column():
    """v = (3, 4) has the one singular value 5: S^1/2 u = 5^1/2 (0.6, 0.8), and 5^1/2 on the right."""
    left, right = factorize(torch.tensor([3.0, 4.0]), rank=100)
    torch.testing.assert_close(left, 5**0.5 * torch.tensor([[0.6, 0.8]]))
    torch.testing.assert_close(right, torch.tensor([[5**0.5]]))
    network = LowRankHypernetwork((2,), (3,), rank=100, hidden=2)
    assert (network.rank, network.times) == (1, 1)
    with torch.no_grad():
        for mlp, last in ((network.left, [[1, 0], [0, 1], [1, 1]]), (network.right, [[1, 0]])):
            mlp[0].weight.copy_(torch.eye(2)[:, : mlp[0].in_features])
            mlp[2].weight.copy_(torch.tensor(last))
            for layer in (mlp[0], mlp[2]):
                layer.bias.zero_()
    # (a, b, a + b) of the left vector, times the right number: 5 (0.6, 0.8, 1.4).
    guess = generate(network, network.prepare(torch.tensor([3.0, 4.0])))
    torch.testing.assert_close(guess, torch.tensor([3.0, 4.0, 7.0]))


def test_the_steps_by_hand():
    """One step of Adam moves every parameter that has a gradient by the learning rate, against the gradient's sign."""
    network = LowRankHypernetwork((1, 1), (1, 1), rank=1, hidden=1)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.fill_(1.0)
    samples = [(network.prepare(torch.tensor([[4.0]])), torch.tensor([[10.0]]))]
    # Each MLP makes relu(2 + 1) + 1 = 4 of the factor 2: guessed 16, 6 too many, so that all parameters fall.
    assert fit(network, samples, epochs=1, learning_rate=0.1) == pytest.approx(36.0)
    assert [p.item() for p in network.parameters()] == pytest.approx([0.9] * 8)
    # Then relu(1.8 + 0.9) 0.9 + 0.9 = 3.33 each. The second round's Adam starts anew: its first step has that size.
    assert fit(network, samples, epochs=1, learning_rate=0.1) == pytest.approx((3.33**2 - 10) ** 2, rel=1e-4)
    assert [p.item() for p in network.parameters()] == pytest.approx([0.8] * 8)
    # The error of two devices is their mean; that of the last epoch counts.
    assert fit(network, samples * 2, epochs=3, learning_rate=0.0) == pytest.approx(
        fit(network, samples, epochs=1, learning_rate=0.0)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["low rank", "full"])
@pytest.mark.parametrize(("source", "target"), [((6, 4, 3, 3), (8, 6, 3, 3)), ((6, 4), (5, 6)), ((8, 4, 3), (8, 6, 3))])
def test_it_learns_a_relation_between_layers(kind, source, target):
    torch.manual_seed(0)
    if kind == "low rank":
        network = LowRankHypernetwork(source, target, rank=100, hidden=32)
    else:
        network = FullHypernetwork(source, target, hidden=32)
    # Two sources with a goal each: what ignores the source can do no better than the goals' mean.
    bases, goals = torch.randn(2, *source), 0.3 * torch.randn(2, *target)

    def seen(which: int) -> torch.Tensor:
        return bases[which] + 0.01 * torch.randn(source)

    samples = [(network.prepare(seen(i % 2)), goals[i % 2] + 0.01 * torch.randn(target)) for i in range(8)]
    error = fit(network, samples, epochs=150, learning_rate=3e-3)
    ignoring = (goals - goals.mean(dim=0)).square().mean()
    assert error < 0.1 * ignoring
    for which in range(2):
        unseen = generate(network, network.prepare(seen(which)))
        assert unseen.shape == torch.Size(target)
        assert (unseen - goals[which]).square().mean() < 0.3 * ignoring


def test_weights_are_read_and_guessed_as_they_are():
    network = FullHypernetwork((2, 1, 3, 3), (3, 2, 3, 3), 4)
    reading, weight = Reading("weight", {}, {}), torch.arange(18.0).reshape(2, 1, 3, 3)
    assert torch.equal(reading.inputs(network, "a", weight), torch.arange(18.0))
    assert reading.wanted("b", weight) is reading.guessed("b", weight) is weight


def test_changes_are_read_and_guessed_in_their_units_by_hand():
    """Sent diag(4, 1), whose root mean square is (17 / 4)^1/2 = 2.0616: a change of unit 0.5 is read 4.1231 times."""
    sent = {"a": torch.diag(torch.tensor([4.0, 1.0])), "b": torch.full((2, 2), 3.0)}
    reading = Reading("change", sent, {"a": 0.5, "b": 0.25})
    network = LowRankHypernetwork((2, 2), (2, 2), rank=2, hidden=2)
    left, right = reading.inputs(network, "a", sent["a"])
    torch.testing.assert_close(left, torch.diag(torch.tensor([2.0, 1.0])))
    torch.testing.assert_close(right, torch.diag(torch.tensor([2.0, 1.0])))
    # + 0.5 in the upper right corner: 2.0616 there, over 4^1/2 and 1.
    _, right = reading.inputs(network, "a", sent["a"] + torch.tensor([[0.0, 0.5], [0.0, 0.0]]))
    torch.testing.assert_close(right, torch.tensor([[2.0, 1.0308], [0.0, 1.0]]), rtol=0, atol=1e-4)
    assert reading.wanted("b", torch.full((2, 2), 3.5)).tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert reading.guessed("b", torch.full((2, 2), -2.0)).tolist() == [[2.5, 2.5], [2.5, 2.5]]
