"""Errors that are for the user."""


class UserError(Exception):
    """An error that is for the user: its text says what was wrong, where, and what would be right.

    Commands print it in one line and end with 1. Any other error is a fault of the program and keeps its traceback.
    """
