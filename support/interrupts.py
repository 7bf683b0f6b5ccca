"""Ctrl-C while the libraries load. Imports nothing slow: the programs call it before they import torch."""

import os
import signal


def quiet_while_loading():
    """Until `as_usual`, Ctrl-C ends the process with one word and exit code 130, whatever import it meets."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # nohup, or a job of a script, ignores it
        signal.signal(signal.SIGINT, leave)


def leave(signum, frame):
    """Not an exception: libraries catch those around the imports that they can do without."""
    os.write(2, b"interrupted\n")
    os._exit(128 + signum)


def as_usual():
    """Ctrl-C raises KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
