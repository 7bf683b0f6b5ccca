"""SIGINT and SIGTERM end a training where nothing is lost, and the user reads the command that goes on."""

import os
import shlex
import signal
import sys
import threading


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM. A KeyboardInterrupt, since no `except Exception` on the way may catch it."""

    def __init__(self, signum):
        self.signum = signum


class Signals:
    """From `catch` to `restore`, the first SIGINT or SIGTERM raises Interrupted, and a second one kills.

    Once an optimiser step has changed the policy, the first one waits for `raise_pending`, at the end of the step.
    """

    def __init__(self):
        self.handlers = {}  # signal -> the handler that was there before
        self.policy_changed = False  # since the last complete step
        self.pending = None  # a signal that waits

    def catch(self):
        if threading.current_thread() is threading.main_thread():  # no other thread may set handlers
            for number in (signal.SIGINT, signal.SIGTERM):
                self.handlers[number] = signal.signal(number, self.handle)

    def restore(self):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)

    def handle(self, number, frame):
        for each in self.handlers:
            signal.signal(each, signal.SIG_DFL)
        self.pending = number
        if not self.policy_changed:
            raise Interrupted(number)
        os.write(2, b"\nfinishing this step first; the same signal again stops at once\n")  # print may be busy

    def before_update(self, *_):
        """A hook that the optimiser calls before each of its steps."""
        self.policy_changed = True

    def raise_pending(self):
        if self.pending:
            raise Interrupted(self.pending)


def resume_command(path):
    """The shell command that goes on with the run at `path`, by the program that is running now."""
    module = getattr(sys.modules["__main__"], "__spec__", None)  # set by `python -m`
    program = ["-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    return shlex.join(["python", *program, "--resume", str(path)])
