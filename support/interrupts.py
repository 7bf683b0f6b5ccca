"""Ctrl-C while the libraries load. Imports nothing slow: the programs call it before they import torch."""

import signal


def quiet_while_loading():
    """Until `as_usual`, Ctrl-C ends the process without a traceback. An exception might be caught around an import."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup, or a job of a script, ignores it
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def as_usual():
    """Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
