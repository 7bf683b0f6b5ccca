"""Which question comes next, and the numbers that decide its draws: both depend on the seed and the place alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from support.errors import UserError


def require_questions(questions, split):
    """Gives the questions. Raises UserError where there are none."""
    if not len(questions):
        raise UserError(f"the task gives no {split} questions")
    return questions


@dataclass
class Order:
    """The training questions in their order, again from the start at its end."""

    questions: Sequence
    seed: int
    place: int = 0  # questions drawn so far
    step: int = 0

    def take(self, count):
        """The next `count` questions, each with the key of its draws -> [(key, question)]."""
        places = range(self.place, self.place + count)
        self.place += count
        return [((self.seed, self.step, place), self.questions[place % len(self.questions)]) for place in places]


def uniform_numbers(keys, group_size, max_tokens):
    """(len(keys) * group_size, max_tokens) float32 numbers in [0, 1), one for each row and position.

    Those of a row depend on (seed, step, place of the question in the order, number of the completion) alone, so waves,
    micro-batches, retries and the number of processes change no draw. A key is (seed, step, place).
    """
    return torch.from_numpy(np.stack([np.random.default_rng((*key, number)).random(max_tokens, np.float32)
                                      for key in keys for number in range(group_size)]))
