"""Kills a training again and again: a program, since only a process of its own can be killed.

    python -m tools.killed KILLS SEED POLICY DATA OUTPUT

Each start is a fork of this process, so that libraries are imported once, those of a loaded policy too. It dies by
SIGKILL at a moment drawn with SEED: before the n-th event of one kind (a draw, a forward pass of the learner, a change
of the disk while a checkpoint is written, half a line of a log), or after a time. It is then resumed, and killed again,
until it has made its 8 steps; a run that was finished is compared with an undisturbed one, and another is begun until
there were KILLS kills.
Prints a JSON summary; exit code 1 if any run ended otherwise than the undisturbed one.
"""

import contextlib
import io
import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import runs
import torch

import grpo
from support import checkpoints, logs

STEPS = 8
KINDS = {"sampling": 60, "learning": 6, "checkpoint": 30, "log": 12, "time": 3}  # kind: latest event, or second


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def before_event(number, places):
    """Makes the `number`-th call of any of the functions `places`, (module, name) pairs, fatal."""
    left = [number]

    def fatal(right):
        def wrapper(*args, **kw):
            left[0] -= 1
            if left[0] == 0:
                die()
            return right(*args, **kw)
        return wrapper

    for module, name in places:
        setattr(module, name, fatal(getattr(module, name)))


def arm(kind, moment):
    if kind == "sampling":
        before_event(moment, [(grpo, "draw_tokens")])
    elif kind == "learning":
        before_event(moment, [(grpo, "completion_logprobs"), (torch.optim.AdamW, "step")])
    elif kind == "checkpoint":
        before_event(moment, [(checkpoints.os, "fsync"), (checkpoints.os, "replace"), (checkpoints, "save_file"),
                              (checkpoints, "checksums"), (checkpoints.shutil, "rmtree")])
    elif kind == "log":
        right, left = logs.Logs.append, [moment]

        def append(log, name, rows):
            left[0] -= 1
            if left[0]:
                return right(log, name, rows)
            text = "".join(map(logs.json_line, rows)).encode()
            with open(log.path / name, "ab") as file:
                file.write(text[:random.Random(moment).randrange(len(text))])
            die()

        logs.Logs.append = append
    else:
        threading.Timer(moment, die).start()


def start(arguments, kind=None, moment=None):
    """A training in a fork -> True if it came to its end, False if it was killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if kind:
                arm(kind, moment)
            with contextlib.redirect_stdout(io.StringIO()):
                code = runs.command(arguments)
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    assert status == 0, f"{arguments} ended with status {status}"
    return True


def main(kills, seed, policy, data, output):
    torch.set_num_threads(1)
    grpo.load_policy(grpo.Config(base_model=policy, device="cpu"))
    output, generator = Path(output), random.Random(seed)

    def begin(name):
        return runs.flags(policy, data, output, experiment_name=name, steps=STEPS, save_every=2, keep_checkpoints=3,
                          test_size=2)

    assert start(begin("undisturbed"))
    expected = runs.result(output / "undisturbed", STEPS)
    assert sum(row["trainer/optimizer_steps"] for row in expected[0]) > STEPS // 2, "it hardly trains"
    done = {kind: 0 for kind in KINDS}
    resumed_after, differing, finished, order = [], [], 0, []
    while sum(done.values()) < kills:
        run = output / f"killed-{finished}"
        while True:
            arguments = ["--resume", str(run)] if (run / "config.json").exists() else begin(run.name)
            if run.exists() and "--resume" not in arguments:  # killed between the folder and its first file
                run.rename(output / f"empty-{len(resumed_after)}")
            if sum(done.values()) == kills:
                assert start(arguments)
                break
            order = order or generator.sample(list(KINDS), len(KINDS))
            kind = order.pop()
            moment = generator.uniform(0.5, KINDS[kind]) if kind == "time" else generator.randint(1, KINDS[kind])
            if start(arguments, kind, moment):
                break
            done[kind] += 1
            resumed_after.append(max((step for step, _ in checkpoints.checkpoint_folders(run)), default=0))
        finished += 1
        if runs.result(run, STEPS) != expected:
            differing.append(run.name)
    print(json.dumps({"kills": done, "runs": finished, "newest checkpoint at each kill": resumed_after,
                      "runs that differ": differing}))
    return bool(differing)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]))
