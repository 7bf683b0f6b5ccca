r"""A completion's text -> the option it chose -> its reward.

Two readings of the final `\boxed{...}`. The strict one is the reward: simple enough that the policy can learn exactly
what is asked. The lenient one only measures, in evaluation, how much of a failure is format and how much is geometry.
Both take time linear in the text, whatever it holds: a policy in training writes anything.
"""

import math
import re
from dataclasses import dataclass

from support.errors import UserError, describe

# The greedy `.*` makes the search begin at the end of the text, so the first match is the last box.
LAST_LETTER_BOX = re.compile(r".*\\boxed\s*\{\s*([A-Da-d])\s*\}", re.DOTALL)
LAST_BOX = re.compile(r"(.*)\\boxed\s*[{｛]", re.DOTALL)
LETTER_BOX = re.compile(r"\\boxed\s*\{\s*([A-Da-d])\s*\}")

# Full-width forms are ASCII shifted by 0xFEE0; U+3000 is the full-width space.
TO_ASCII = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: " "}
WRAPPER = re.compile(r"\\(?:text(?:bf|rm|it|sf|tt|normal)?|math(?:rm|bf|it|sf|tt)|rm|bf|bm|boldsymbol|mbox|left|right)"
                     r"(?![A-Za-z])\s*|[{}$]")
SPACE = re.compile(r"\\(?:[,;:! \\]|q?quad(?![A-Za-z]))|~")
# An option's letter, then what marks it as a label: brackets, a mark, the end, or a space before a number.
LABELLED = re.compile(r"""\s* (?: [(\[【] \s* ([A-Da-d]) \s* [)\]】]
                                | ([A-Da-d]) (?: \s* [)\]】.、:] | \s* \Z | \s+ (?= \d | [√π] | \\(?:[dt]?frac|sqrt|pi)) )
                              ) \s* (.*)""", re.DOTALL | re.VERBOSE)
# `(A) = 5` and `(A)^2` are formulas; a further letter on its own makes it `A or C`.
NOT_A_VALUE = re.compile(r"[=^_+*/<>]|.*(?<![A-Za-z])[A-Da-d](?![A-Za-z])", re.DOTALL)
LONGEST_BODY = 400  # characters; longer boxes hold no option, and this bounds the work of the lenient reading


@dataclass(frozen=True)
class Reading:
    """What an answer says. The lenient choice is only measured."""

    choice: object  # None: no answer found
    right: bool
    lenient_choice: object = None
    lenient_right: bool = False


def extract_choice(text, lenient=False):
    r"""Find the option that a completion chose: "A", "B", "C", "D", or None. Never guesses between two.

    Strict: the last box that holds exactly one letter A-D decides; whitespace in the box and case are ignored.
    Lenient: only the last box counts, and its letter may be wrapped, bracketed, full-width, or followed by its option.

    >>> extract_choice(r"so \boxed{ b }"), extract_choice(r"\boxed{A}, that is \boxed{35}")
    ('B', 'A')
    >>> extract_choice(r"\boxed{\textbf{(C)} 30}"), extract_choice(r"\boxed{\textbf{(C)} 30}", lenient=True)
    (None, 'C')
    >>> [extract_choice(box, lenient=True) for box in (r"\boxed{B：35°}", r"\boxed{A或C}", r"\boxed{A}, \boxed{35}")]
    ['B', None, None]
    """
    if not lenient:
        match = LAST_LETTER_BOX.match(text)
        return match[1].upper() if match else None
    box = LAST_BOX.match(text)
    if not box:
        return None
    letter = LETTER_BOX.match(text, box.end(1))
    if letter:
        return letter[1].upper()
    body = _balanced(text[box.end():box.end() + LONGEST_BODY].translate(TO_ASCII))
    match = LABELLED.fullmatch(WRAPPER.sub("", SPACE.sub(" ", body)))
    if not match:
        return None
    letter, rest = match[1] or match[2], match[3]
    # `a: 5` may well be a ratio of two lengths: a small letter counts only where nothing follows it.
    if NOT_A_VALUE.match(rest) or (rest and letter.islower()):
        return None
    return letter.upper()


def read_choice(text, question):
    """A completion's text and its question -> Reading: both readings of the option that it chose."""
    choice, lenient = extract_choice(text), extract_choice(text, lenient=True)
    return Reading(choice, choice is not None and choice == question.label, lenient,
                   lenient is not None and lenient == question.label)


def reward_completion(completion, rewards, weights):
    """Sets `completion.rewards`, name -> raw number for each of `weights`, and `.reward`, their weighted sum.

    `rewards`: name -> f(completion, question) -> number. Raises UserError, which names reward and question, where one
    fails or gives no finite number.
    """
    question = completion.prompt.question
    for name in weights:
        try:
            completion.rewards[name] = float(rewards[name](completion, question))
        except Exception as error:  # it may be a user's own
            raise UserError(f"the reward {name} fails for question {question.id}: {type(error).__name__}: "
                            f"{describe(error)}") from error
        if not math.isfinite(completion.rewards[name]):
            raise UserError(f"the reward {name} of question {question.id} is {completion.rewards[name]}")
    completion.reward = sum(weight * completion.rewards[name] for name, weight in weights.items())


def overlong_penalty(lengths, max_tokens):
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13), over the last quarter: 0 up to it, -1 at the limit."""
    cache = max_tokens // 4
    return ((max_tokens - cache - lengths) / cache).clamp(-1.0, 0.0)


def _balanced(text):
    """Give `text` up to the brace that closes a box opened just before it, "" if none does."""
    depth = 1
    for i, char in enumerate(text):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return text[:i]
    return ""
