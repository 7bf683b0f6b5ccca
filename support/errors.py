"""The error that a user can fix, and text that is safe in a terminal. Imports nothing of the project."""


class UserError(Exception):
    """A mistake that the user can fix. The command line prints it as one line on stderr and exits with code 2."""


def printable(text):
    """Text for the terminal on one line: control characters, which could move its cursor, are escaped."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def describe(error):
    """An exception as part of one line."""
    return printable(" ".join(str(error).split()))[:300] or type(error).__name__
