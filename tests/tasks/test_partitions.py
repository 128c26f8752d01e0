import json
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from wildflower.tasks import index as index_files
from wildflower.tasks import partitions
from wildflower.tasks.data import Data, DataSet
from wildflower.tasks.index import Index
from wildflower.tasks.partitions import PARTITIONS, PartitionSettings, draw
from wildflower.tasks.task import TaskSpec, load_task

RECORDED = json.loads((Path(__file__).parent / "flwr_datasets.json").read_text())
LABELS = np.random.default_rng(3).integers(0, 5, 600)
NATURAL_IDS = np.random.default_rng(4).permutation(np.repeat(np.arange(6), [10, 20, 30, 40, 200, 300]))


def _divide(kind: str, *, labels: np.ndarray = LABELS, alpha: float = 0.5, devices: int = 6, seed: int = 1) -> Index:
    """The examples of every device, for which the data set's labels and natural ids are all that counts."""
    examples = Data(torch.empty(len(labels), 1), torch.from_numpy(labels))
    data = DataSet(examples, examples, classes=6, natural_ids=torch.from_numpy(NATURAL_IDS))
    settings = PartitionSettings(partition=kind, alpha=alpha, devices=devices, seed=seed)
    found = PARTITIONS[kind](settings, data, in_time=False)
    return Index.of([found.examples(device) for device in range(devices)])


def _class_shares(index: Index) -> np.ndarray:
    counts = np.array([np.bincount(LABELS[index[device]], minlength=5) for device in range(len(index))])
    return counts / counts.sum(1, keepdims=True)


@pytest.mark.parametrize("kind", ["iid", "dirichlet", "natural"])
def test_every_example_is_dealt_once(kind: str) -> None:
    index = _divide(kind)
    assert len(index) == 6
    assert sorted(np.concatenate([index[device] for device in range(6)]).tolist()) == list(range(600))


def test_iid_shares_are_equal_and_shuffled() -> None:
    index = _divide("iid", devices=7)
    assert {len(index[device]) for device in range(7)} == {85, 86}
    assert (np.diff(index[0]) < 0).any()
    assert np.abs(_class_shares(_divide("iid")) - np.bincount(LABELS) / 600).max() < 0.12


def test_a_small_alpha_gives_unlike_devices_a_large_one_alike() -> None:
    unlike, alike = _class_shares(_divide("dirichlet", alpha=0.1)), _class_shares(_divide("dirichlet", alpha=1e4))
    assert unlike.max(1).mean() > 0.6
    assert alike.max(1).mean() < 0.3


@pytest.mark.parametrize("seed", range(4))
def test_a_device_with_more_than_an_equal_share_gets_no_further_class(seed: int) -> None:
    index = _divide("dirichlet", alpha=0.2, seed=seed)
    for device in range(6):
        counts = np.bincount(LABELS[index[device]], minlength=5)
        already = np.cumsum(counts) - counts
        # One stray example of a class may fall to the last device when shares are rounded.
        assert (counts[already > 100] <= 1).all()


def test_a_dirichlet_partition_leaves_no_device_almost_empty() -> None:
    index = _divide("dirichlet", alpha=0.3, devices=10)
    assert min(len(index[device]) for device in range(10)) >= partitions.MAX_REQUIRED_EXAMPLES


def test_a_dirichlet_partition_of_few_examples_asks_less() -> None:
    """60 devices with 10 examples on average cannot all have 10."""
    index = _divide("dirichlet", alpha=5.0, devices=60)
    assert min(len(index[device]) for device in range(60)) >= 2


def test_a_hopeless_dirichlet_partition() -> None:
    words = r'over 300 devices with alpha = 0\.001 .*: take partition = "iid", raise alpha, use fewer devices'
    with warnings.catch_warnings(action="error"), pytest.raises(ValueError, match=words):
        _divide("dirichlet", alpha=0.001, devices=300)


def test_natural_devices_are_the_sources() -> None:
    index = _divide("natural")
    for device in range(6):
        assert len(np.unique(NATURAL_IDS[index[device]])) == 1
    assert sorted(len(index[device]) for device in range(6)) == [10, 20, 30, 40, 200, 300]


def test_some_of_the_sources_are_chosen_by_the_seed() -> None:
    chosen = {tuple(NATURAL_IDS[_divide("natural", devices=2, seed=seed)[0]][:1]) for seed in range(20)}
    assert len(chosen) > 2
    assert len(_divide("natural", devices=2)) == 2


def test_more_devices_than_sources() -> None:
    with pytest.raises(ValueError, match="7 devices are more than the 6 natural ids"):
        _divide("natural", devices=7)


def test_a_task_without_natural_ids() -> None:
    with pytest.raises(ValueError, match="partition 'natural' needs a task that records where each example is from"):
        load_task(TaskSpec(name="digits", devices=2, partition="natural"))


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_more_devices_than_examples(kind: str) -> None:
    with pytest.raises(ValueError, match="601 devices are more than the 600 training examples"):
        _divide(kind, devices=601)


@pytest.mark.parametrize("kind", ["iid", "dirichlet"])
def test_the_seed_determines_the_partition(kind: str, empty_cache: Path) -> None:
    first = _divide(kind, seed=1)
    for file in empty_cache.rglob("*.npz"):
        file.unlink()
    again, other = _divide(kind, seed=1), _divide(kind, seed=2)
    assert np.array_equal(first.examples, again.examples)
    assert np.array_equal(first.starts, again.starts)
    assert not np.array_equal(first.examples, other.examples)


def test_each_thing_that_determines_a_partition_has_its_own_file(empty_cache: Path) -> None:
    _divide("dirichlet")
    _divide("dirichlet", alpha=0.6)
    _divide("dirichlet", seed=2)
    _divide("dirichlet", devices=5)
    _divide("dirichlet", labels=np.roll(LABELS, 1))
    _divide("iid")
    _divide("iid", alpha=0.6)  # of no account here
    _divide("dirichlet", alpha=5)
    _divide("dirichlet", alpha=5.0)  # the same number
    _divide("natural")
    _divide("natural", devices=3, seed=2)  # chosen out of the same file
    assert len(list(empty_cache.rglob("*.npz"))) == 8


def test_a_kept_partition_is_read_and_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = _divide("dirichlet", seed=7)
    monkeypatch.setattr(partitions, "dirichlet", None)
    assert np.array_equal(_divide("dirichlet", seed=7).examples, computed.examples)


def test_a_partition_of_another_release_is_not_read(monkeypatch: pytest.MonkeyPatch, empty_cache: Path) -> None:
    _divide("iid")
    monkeypatch.setattr(index_files, "INDEX_VERSION", 99)
    _divide("iid")
    assert len(list(empty_cache.rglob("*.npz"))) == 2


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: f"{case['partition']}-{case.get('alpha', '')}")
def test_partitions_are_those_of_flwr_datasets(case: dict[str, Any]) -> None:
    """flwr_datasets.json has what the partitioners of flwr-datasets 0.6.1 dealt out, for iid of the shuffled examples.

    With alpha = 0.01 a class's draw has only devices that are full; with alpha = 0.1 the second attempt counts.
    """
    labels = (np.arange(150) ** 2 * 7 // 3) % 6
    keys = {"alpha": 1.0, "seed": 0} | {key: case[key] for key in ("alpha", "devices", "seed") if key in case}
    compute: dict[str, Callable[[], Index]] = {
        "iid": lambda: partitions.iid(len(labels), keys["devices"], keys["seed"]),
        "natural": lambda: partitions.natural(labels),
        "dirichlet": lambda: partitions.dirichlet(labels, keys["alpha"], keys["devices"], keys["seed"]),
    }
    index = compute[case["partition"]]()
    assert [index[device].tolist() for device in range(len(index))] == case["parts"]


@pytest.mark.parametrize("content", [b"", b"not an archive", None])
def test_a_spoiled_index_file_is_named(content: bytes | None, empty_cache: Path) -> None:
    _divide("iid")
    (file,) = empty_cache.rglob("*.npz")
    file.write_bytes(file.read_bytes()[:-30] if content is None else content)
    with pytest.raises(ValueError, match=f"{file.name} cannot be read"):
        _divide("iid")


@pytest.mark.parametrize(
    ("examples", "starts"), [([0] * 600, range(0, 601, 100)), (range(600), [0, 0, 200, 300, 400, 500, 600])]
)
def test_an_index_file_that_deals_wrongly_is_refused(examples: list[int], starts: list[int], empty_cache: Path) -> None:
    _divide("iid")
    (file,) = empty_cache.rglob("*.npz")
    np.savez(file, examples=np.array(examples), starts=np.array(starts))
    with pytest.raises(ValueError, match="does not deal 600 examples to 6 devices"):
        _divide("iid")


def test_processes_at_once_end_with_one_whole_file(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(6)
    compute = partitions.iid

    def compute_at_once(examples: int, devices: int, seed: int) -> Index:
        index = compute(examples, devices, seed)
        together.wait(timeout=30)
        return index

    monkeypatch.setattr(partitions, "iid", compute_at_once)
    results: list[Index] = []
    threads = [threading.Thread(target=lambda: results.append(_divide("iid"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 6
    assert all(np.array_equal(result.examples, results[0].examples) for result in results)
    assert [file.suffix for file in (empty_cache / "partitions").iterdir()] == [".npz"]


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WILDFLOWER_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="set WILDFLOWER_CACHE to a folder that can be written"):
        _divide("iid")


MEMBERS = [np.flatnonzero(label == LABELS) for label in range(5)]


def _draw(device: int, *, alpha: float | None = 0.5, examples: int = 50, seed: int = 1) -> np.ndarray:
    members = MEMBERS if alpha is not None else [np.arange(600)]
    return draw(members, alpha=alpha, device=device, seed=seed, examples=examples)


@pytest.mark.parametrize("alpha", [None, 0.01, 0.5, 100.0])
@pytest.mark.parametrize("examples", [1, 50, 599, 600])
def test_a_device_draws_different_examples(alpha: float | None, examples: int) -> None:
    drawn = _draw(99_999, alpha=alpha, examples=examples)
    assert len(set(drawn.tolist())) == len(drawn) == examples
    assert set(drawn.tolist()) <= set(range(600))


def test_a_drawn_shard_depends_on_seed_and_device_alone() -> None:
    assert np.array_equal(_draw(5), _draw(5))
    assert not np.array_equal(_draw(5), _draw(6))
    assert not np.array_equal(_draw(5), _draw(5, seed=2))


def test_drawn_mixes_follow_alpha() -> None:
    def largest_share(alpha: float | None) -> float:
        return float(np.mean([np.bincount(LABELS[_draw(d, alpha=alpha)]).max() / 50 for d in range(40)]))

    assert largest_share(0.1) > 0.7
    assert largest_share(1e4) < 0.35
    assert largest_share(None) < 0.35


def test_drawn_examples_cover_the_data() -> None:
    assert len(np.unique(np.concatenate([_draw(device, alpha=None) for device in range(100)]))) > 590


def test_a_class_that_runs_out_is_made_up_for_by_others() -> None:
    members = [np.arange(3), np.arange(3, 1000), np.arange(0)]
    counts = [np.sum(draw(members, alpha=0.05, device=d, seed=0, examples=100) < 3) for d in range(40)]
    assert max(counts) == 3


TEST_LABELS = np.random.default_rng(5).integers(0, 5, 240)


def _settings(strong: int = 2, share: float = 0.5, alpha: float = 0.5, **others: Any) -> PartitionSettings:
    of_strong = {"strong_devices": strong, "strong_share": share}
    return PartitionSettings(partition="strong-and-weak", alpha=alpha, **of_strong, **others)


def _strong_and_weak(labels: np.ndarray = LABELS, seed: int = 1, **changes: float) -> tuple[Index, Index]:
    return partitions.strong_and_weak(labels, TEST_LABELS, _settings(**{"seed": seed, "devices": 12, **changes}))


def test_strong_and_weak_deal_out_training_and_test_examples_once() -> None:
    for seed in range(5):
        train, test = _strong_and_weak(seed=seed)
        assert len(train) == len(test) == 12
        assert sorted(train.examples.tolist()) == list(range(600))
        assert sorted(test.examples.tolist()) == list(range(240))
        assert {len(test[device]) for device in range(12)} == {20}
        assert {len(train[device]) for device in range(2)} <= {149, 150, 151}
        assert {len(train[device]) for device in range(2, 12)} <= {29, 30, 31}


@pytest.mark.parametrize(("share", "strong"), [(0.1, 60), (0.9, 540)])
def test_the_share_of_the_strong(share: float, strong: int) -> None:
    train, _ = _strong_and_weak(share=share)
    assert abs(len(train[0]) + len(train[1]) - strong) <= 5


def test_strong_devices_hold_all_classes_alike_and_weak_ones_do_not() -> None:
    train, _ = _strong_and_weak(alpha=0.1)
    shares = _class_shares(train)
    whole = np.bincount(LABELS) / 600
    assert np.abs(shares[:2] - whole).max() < 0.02
    assert shares[2:].max(1).mean() > 0.5
    alike = np.abs(_class_shares(_strong_and_weak(alpha=1e5)[0]) - whole).sum(1) / 2
    assert alike[2:].mean() < 0.3
    assert np.abs(shares[2:] - whole).sum(1).mean() / 2 > 0.35


def test_no_weak_device_is_left_with_what_the_others_did_not_want() -> None:
    """Taking in turn, the last devices get as near to the mix they drew as the first."""
    labels = np.repeat(np.arange(5), 400)
    wrong = np.zeros(40)
    for seed in range(20):
        train, _ = partitions.strong_and_weak(labels, np.repeat(np.arange(5), 20), _settings(devices=42, seed=seed))
        rng = np.random.default_rng([seed, 42, 2, 2])
        for label in range(5):
            rng.permutation(np.flatnonzero(labels == label))
        mixes = rng.dirichlet(np.full(5, 0.5), size=40)
        got = np.array(
            [np.bincount(labels[train[2 + device]], minlength=5) / len(train[2 + device]) for device in range(40)]
        )
        wrong += np.abs(got - mixes).sum(1) / 2 / 20
    assert wrong[30:].mean() < wrong[:10].mean() + 0.03


def test_a_device_tests_on_the_mix_it_trains_on() -> None:
    train, test = _strong_and_weak(labels=np.repeat(np.arange(5), 120))
    wrong = 0.0
    for device in range(12):
        counts = np.bincount(np.repeat(np.arange(5), 120)[train[device]], minlength=5)
        tested = np.bincount(TEST_LABELS[test[device]], minlength=5)
        wrong += np.abs(counts / counts.sum() - tested / tested.sum()).sum() / 2 / 12
    assert wrong < 0.1  # the last devices take what is left


def test_strong_and_weak_repeat_themselves() -> None:
    first, second, other = _strong_and_weak(), _strong_and_weak(), _strong_and_weak(seed=2)
    for one, same, different in zip(first, second, other, strict=True):
        assert np.array_equal(one.examples, same.examples)
        assert not np.array_equal(one.examples, different.examples)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"strong": 0}, "strong_devices from 1 to 11, got 0"),
        ({"strong": 12}, "strong_devices from 1 to 11, got 12"),
        ({"share": 0.001}, "leaves a device without any"),
        ({"share": 0.999}, "leaves a device without any"),
        ({"devices": 300}, "leaves a device without any"),
    ],
)
def test_strong_and_weak_need_an_example_for_each(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _strong_and_weak(**changes)
