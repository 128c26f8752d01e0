"""TREC's questions, `task = "questions:TASK"`: the task that InclusiveFL's experiments have."""

from benchmarks.inclusivefl.trec import TASK

__all__ = ["TASK"]
