"""Checks of a run's start or resumption in a folder: with the same settings, fleet, modules, weights and data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wildflower.plugins.raised_as import raised_as
from wildflower.plugins.reference import is_reference
from wildflower.server_app.run_folder import JournalError, is_run, read_config, read_rounds, read_summary

# Tasks whose data set is what the folder holds; those of named data sets may lie anywhere.
DATA_OF_A_FOLDER = ("idx", "npz", "images", "table", "text")
# What a resumed run may change without becoming another experiment: where things lie, and how far and how fast it goes.
MAY_CHANGE_ON_RESUME = frozenset(
    {
        "resume",
        "checkpoints.resume-from",
        "dp.resume-copy",
        "checkpoints.keep",
        "tracker",
        "rounds",
        "workers",
        "output-dir",
    }
    | {"data-dir", "delivery.every", "delivery.format", "evaluate-every", "personal.every", "personal.first-round"}
)


def check_folder(run_dir: Path, resume: bool) -> None:
    """Raise JournalError unless a new run may start in `run_dir`, or with `resume` an earlier one go on there."""
    exists = is_run(run_dir)
    if exists and not resume and not _broke_off_at_once(run_dir):
        summary = read_summary(run_dir)
        state = f"a {summary.status}" if summary else "an unfinished"
        raise JournalError(
            f"{run_dir} already holds {state} run, which is not overwritten: "
            "choose another run-name, or go on with it by resume=true"
        )
    if resume and not exists:
        raise JournalError(f"{run_dir} holds no run to resume: check output-dir and run-name, or set resume=false")


def _broke_off_at_once(run_dir: Path) -> bool:
    """Whether a run ended before its first checkpoint, as on a full disk: there is nothing of it to keep."""
    from wildflower.server_app import checkpoint, ledger  # the first imports torch, and this is seldom asked

    # What a private run has released is known, whatever became of the run.
    return not checkpoint.exists(run_dir) and len(read_rounds(run_dir)) <= 1 and not ledger.has_releases(run_dir)


def check_resumable(run_dir: Path, config: Mapping[str, Any]) -> None:
    """Raise JournalError unless the run in `run_dir` may go on with this configuration.

    Keys that nothing reads make no difference, such as those of other methods, of which another version may have
    others.
    """
    from wildflower.server_app import ledger
    from wildflower.server_app.checkpoint import CheckpointError, check_there
    from wildflower.server_app.config import RunConfig, unread  # both import torch

    before = read_config(run_dir).config
    read = set().union(*(values.keys() - set(unread(values)) for values in (before, config)))
    changed = [
        f"{key} was {before.get(key)!r} and is {config.get(key)!r}"
        for key in sorted(before.keys() | config.keys())
        if before.get(key) != config.get(key)
        and key in read
        and (key not in MAY_CHANGE_ON_RESUME or (key == "data-dir" and is_of_a_folder(config.get("task"))))
    ]
    if changed:
        raise JournalError(f"the run in {run_dir} cannot be resumed with another configuration: " + ", ".join(changed))
    if config.get("dp.epsilon") and before.get("rounds") != config.get("rounds"):
        raise JournalError(
            f"rounds = {config['rounds']}: the run in {run_dir} has the noise with which {before['rounds']} rounds "
            f"reach dp.epsilon = {config['dp.epsilon']:g}: leave rounds as they were"
        )
    if config.get("schedule.kind") == "cosine" and before.get("rounds") != config.get("rounds"):
        raise JournalError(
            f"rounds = {config['rounds']}: the learning rate of the run in {run_dir} falls towards 0 over "
            f"{before['rounds']} rounds, and the rounds that are done had those rates: leave rounds as they were, or "
            "begin another run from its model (initial.weights)"
        )
    if before.get("rounds") != config.get("rounds"):
        run = RunConfig.from_run_config(config)
        if run.method.traits(run.params).depends_on_rounds:
            raise JournalError(
                f"rounds = {config['rounds']}: what {run.method_name} does in a round of the run in {run_dir} depends "
                f"on its having {before['rounds']} rounds: leave rounds as they were, or begin another run from its "
                "model (initial.weights)"
            )
    if config.get("dp.epsilon") or config.get("dp.noise-multiplier"):
        ledger.check(run_dir, seeded=bool(config.get("fleet")), copied=bool(config.get("dp.resume-copy")))
    finished = len(read_rounds(run_dir))
    if again_from := config.get("checkpoints.resume-from", 0):
        if again_from > finished:
            raise JournalError(
                f"checkpoints.resume-from = {again_from}, but the run in {run_dir} has {finished} rounds"
            )
        with raised_as(JournalError, "", CheckpointError):
            check_there(run_dir, again_from)
    finished = again_from or finished
    # Nothing would be run, and config.json would say fewer rounds than there are.
    if config["rounds"] < finished:
        raise JournalError(
            f"rounds = {config['rounds']}, but the run in {run_dir} has {finished}: ask for {finished} or more to go "
            "on with it, or start another run under another run-name"
        )


def is_of_a_folder(task: object) -> bool:
    """Return whether a task's data set is what its folder holds; of one from outside the project nothing else is
    known."""
    return task in DATA_OF_A_FOLDER or is_reference(task)


def check_same(
    run_dir: Path,
    *,
    fleet: tuple[object, str] | None = None,
    plugins: Mapping[str, str] | None = None,
    initial: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Raise JournalError unless files hold what they held when the run in `run_dir` began; None is not looked at.

    Args:
        fleet: its name, and the hash of its files.
        plugins: hashes of the modules from outside, by their names.
        initial: the hash of the file of first weights.
        data: what identifies the data, where the run says it. Runs whose devices hold their own do not.
    """
    before = read_config(run_dir)
    back = "put the old files back, or start another run"
    why = ""
    if fleet is not None and before.fleet != fleet[1]:
        why = f"the fleet file {fleet[0]!r} or a trace that it names is not what it was when the run began; {back}"
    elif plugins is not None and before.plugins != plugins:
        names = before.plugins.keys() | plugins.keys()
        changed = sorted(name for name in names if before.plugins.get(name) != plugins.get(name))
        are = "is" if len(changed) == 1 else "are"
        why = f"{', '.join(changed)} from outside the project {are} not as when the run began; {back}"
    elif initial is not None and before.initial != initial:
        why = "the file of initial.weights is not as when the run began; put the old one back, or start another run"
    elif data is not None and (changed := [key for key in before.data if before.data[key] != data.get(key)]):
        told = [f"{key.replace('-', ' ')}: {before.data[key]} then, {data.get(key)} now" for key in changed]
        told = [text for text in told if not text.startswith("sha256")]
        differ = "; ".join(told) or "there are as many examples, and their labels or inputs differ"
        back = "put the old data back, or start another run"
        why = f"its data are not what they were when the run began ({differ}); {back}"
    if why:
        raise JournalError(f"the run in {run_dir} cannot be resumed: {why}")
