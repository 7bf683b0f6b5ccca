"""Answers to choices to rewards: the two readings, their time, and the weighted sum of what a task gives."""

import doctest
import math
import time
from types import SimpleNamespace

import pytest
import torch

import reward
from geoqa import Question
from reward import Reading, extract_choice, read_choice, reward_completion
from support.errors import UserError

STRICT = [
    (r"\boxed{A}", "A"),
    (r"so it is \boxed{ b }.", "B"),
    ("\\boxed{\n\tc\u3000}", "C"),
    (r"\boxed{A} no, wait: \boxed{D}", "D"),
    (r"\boxed{A} is \boxed{35}", "A"),  # the last box that holds exactly one letter, not the last box
    (r"\boxed{A} is \boxed{B", "A"),
    (r"\boxed{\boxed{C}}", "C"),
    (r"\boxed{A}}}", "A"),
    (r"\boxed {A}", "A"),
    ("\\boxed \n\u3000{ b }", "B"),
    (r"\boxed{A} no, wait: \boxed {D}", "D"),
    (r"\boxed {A} is \boxed  {35}", "A"),
    (r"\boxed{\text{B}}", None),
    (r"\boxed{(C)}", None),
    (r"\boxed{D.}", None),
    (r"\boxed\,{A}", None),
    (r"\boxed｛A｝", None),
    (r"\boxed A", None),
    (r"\boxed{Ａ}", None),
    (r"\boxed{A B}", None),
    (r"\boxed{AB}", None),
    (r"\boxed{E}", None),
    (r"\boxed{}", None),
    (r"boxed{A}", None),
    (r"\Boxed{A}", None),
    ("the answer is A", None),
    ("", None),
]

LENIENT = [
    (r"\boxed{A}", "A"),
    (r"\boxed{ b }", "B"),
    (r"\boxed {C}", "C"),
    (r"\boxed{\text{B}}", "B"),
    (r"\boxed{\text{ \textbf{d} }}", "D"),
    (r"\boxed{\rm A}", "A"),
    (r"\boxed{$\mathbf{A}$}", "A"),
    (r"\boxed{{A}}", "A"),
    (r"\boxed{(C)}", "C"),
    (r"\boxed{(c)}", "C"),
    (r"\boxed{\left( C \right)}", "C"),
    (r"\boxed{[C]}", "C"),
    (r"\boxed{【C】}", "C"),
    (r"\boxed{D.}", "D"),
    (r"\boxed{d.}", "D"),
    (r"\boxed{C)}", "C"),
    (r"\boxed{\textbf{(A)} 30}", "A"),
    (r"\boxed{\mathrm{(B)}~5\,\mathrm{cm}}", "B"),
    (r"\boxed{(A) -5}", "A"),
    (r"\boxed{\text{B. } 35^\circ}", "B"),
    (r"\boxed{B.35^{\circ}}", "B"),
    (r"\boxed{B: \frac{\sqrt{3}}{2}}", "B"),
    (r"\boxed{B：35°}", "B"),
    (r"\boxed{B．35°}", "B"),
    (r"\boxed{B、35°}", "B"),
    (r"\boxed{A. 30°或150°}", "A"),
    (r"\boxed{D. 无法确定}", "D"),
    (r"\boxed{C. \triangle ABC}", "C"),
    (r"\boxed{B 35}", "B"),
    (r"\boxed{B\quad 35^\circ}", "B"),
    (r"\boxed{B\ \sqrt{3}}", "B"),
    (r"\boxed{B √3}", "B"),
    (r"\boxed{Ａ}", "A"),
    (r"\boxed{（Ｃ）}", "C"),
    (r"\boxed｛Ｄ｝", "D"),
    (r"\boxed{\boxed{\text{A}}}", "A"),
    (r"\boxed{35} so \boxed{\text{A}}", "A"),
    (r"\boxed{" + " " * 1000 + "A" + " " * 1000 + "}", "A"),
    # only the last box counts
    (r"\boxed{A} is \boxed{35}", None),
    (r"\boxed{A} is \boxed{B", None),
    # never a guess between two, nor a letter that is a point, a length or a word
    (r"\boxed{AB}", None),
    (r"\boxed{A, C}", None),
    (r"\boxed{A，C}", None),
    (r"\boxed{A、C}", None),
    (r"\boxed{A+B}", None),
    (r"\boxed{A B}", None),
    (r"\boxed{A~C}", None),
    (r"\boxed{A/C}", None),
    (r"\boxed{A-C}", None),
    (r"\boxed{A. B}", None),
    (r"\boxed{A:B=1:2}", None),
    (r"\boxed{A 30, C 50}", None),
    (r"\boxed{(A)(C)}", None),
    (r"\boxed{(A) or (C)}", None),
    (r"\boxed{\text{A}, \text{C}}", None),
    (r"\boxed{\text{A}\text{C}}", None),
    (r"\boxed{A \text{ or } C}", None),
    (r"\boxed{A and C}", None),
    (r"\boxed{A或C}", None),
    (r"\boxed{A和C}", None),
    (r"\boxed{A = 5}", None),
    (r"\boxed{A=5}", None),
    (r"\boxed{(A)=5}", None),
    (r"\boxed{(A)^2}", None),
    (r"\boxed{a: 5}", None),
    (r"\boxed{a 5}", None),
    (r"\boxed{A cm}", None),
    (r"\boxed{A\text{ cm}}", None),
    (r"\boxed{A -5}", None),
    (r"\boxed{A5}", None),
    (r"\boxed{A_1}", None),
    (r"\boxed{A'}", None),
    (r"\boxed{(A}", None),
    (r"\boxed{35^\circ}", None),
    (r"\boxed{BC=5}", None),
    (r"\boxed{\angle A}", None),
    (r"\boxed{\frac{A}{2}}", None),
    (r"\boxed{5A}", None),
    (r"\boxed{选B}", None),
    (r"\boxed{E}", None),
    (r"\boxed{}", None),
    (r"\boxed{А}", None),  # Cyrillic
    (r"\boxed{A", None),
    (r"\boxed{\text{A}", None),
    (r"\boxed A", None),
    ("A", None),
    ("", None),
]


@pytest.mark.parametrize("text, choice", STRICT)
def test_strict(text, choice):
    assert extract_choice(text) == choice


@pytest.mark.parametrize("text, choice", LENIENT)
def test_lenient(text, choice):
    assert extract_choice(text, lenient=True) == choice


@pytest.mark.parametrize("before", ["", r"\boxed{35} ", r"\boxed{\text{A}} ", r"\boxed{A", "｛"])
@pytest.mark.parametrize("box", [r"\boxed{%s}", r"\boxed{ %s}", "\\boxed{\n%s\n}", r"\boxed{%s}}"])
@pytest.mark.parametrize("letter", "ABCDabcd")
def test_lenient_agrees_where_the_last_box_holds_a_letter(before, box, letter):
    text = before + box % letter
    assert extract_choice(text, lenient=True) == extract_choice(text) == letter.upper()


def question(label, id="q"):
    return Question(id, None, "?", ("1", "2", "3", "4"), label)


@pytest.mark.parametrize("label", "ABCD")
def test_read_choice(label):
    for letter in "ABCD":
        right = letter == label
        assert read_choice(rf"\boxed{{{letter}}}", question(label)) == Reading(letter, right, letter, right)
    assert read_choice(rf"\text{{{label}}}", question(label)) == Reading(None, False, None, False)
    # The lenient reading is only measured.
    assert read_choice(rf"\boxed{{\text{{{label}}}}}", question(label)) == Reading(None, False, label, True)
    assert read_choice(rf"\boxed{{{label}}} is \boxed{{35}}", question(label)) == Reading(label, True, None, False)


@pytest.mark.parametrize("label", ["", "AB", "a", "E", 0, None])
def test_no_answer_is_right_where_the_label_is_no_option(label):
    for text in ("", "A", r"\boxed{A}", r"\boxed{E}", r"\boxed{}"):
        reading = read_choice(text, question(label))
        assert not reading.right and not reading.lenient_right


# The weighted sum


def completion(text=""):
    return SimpleNamespace(prompt=SimpleNamespace(question=question("B", "q7")), text=text, rewards={}, reward=0.0)


def test_rewards_are_kept_raw_and_summed_by_weight():
    seen = []
    rewards = {"right": lambda answer, question: question.label in answer.text, "length": lambda a, q: len(a.text),
               "tensor": lambda a, q: torch.tensor(0.25), "unused": lambda a, q: seen.append(a)}
    answer = completion("is B")
    reward_completion(answer, rewards, {"length": -0.5, "right": 2.0, "tensor": 4.0})
    assert answer.rewards == {"length": 4.0, "right": 1.0, "tensor": 0.25} and answer.reward == 1.0 and not seen
    assert all(type(value) is float for value in (*answer.rewards.values(), answer.reward))


def broken(answer, question):
    raise KeyError("two\nlines \x1b[2J")


@pytest.mark.parametrize("rule, message", [
    (broken, r"the reward mine fails for question q7: KeyError: 'two\nlines \x1b[2J'"),
    (lambda answer, question: None, "the reward mine fails for question q7: TypeError: "),
    (lambda answer, question: "much", "the reward mine fails for question q7: ValueError: "),
    (lambda answer: 1.0, "the reward mine fails for question q7: TypeError: "),
    (lambda answer, question: math.nan, "the reward mine of question q7 is nan"),
    (lambda answer, question: -math.inf, "the reward mine of question q7 is -inf")])
def test_a_reward_that_is_no_number_is_named(rule, message):
    with pytest.raises(UserError) as error:
        reward_completion(completion(), {"right": lambda answer, question: 1.0, "mine": rule}, {"right": 1, "mine": 1})
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


# Time and examples


UNITS = [
    "{", "}", "｛", "\\", "$", "(", " ", "\n", "A ", "A", "\0", "\ud800", "\U0001d400",
    r"\boxed", r"\boxed ", r"\boxed{", r"\boxed｛", r"\boxed{A", r"\boxed{A ", r"\boxed{ ",
    r"\boxed{\text{", r"\boxed{35}", r"\boxed{(", r"\text",
]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("size, limit", [(100_000, 0.05), (1_000_000, 0.2)])
def test_any_text_takes_linear_time(lenient, size, limit):
    for head in ("", r"\boxed", r"\boxed{", r"\boxed{A ", r"\boxed{(A"):
        for unit in UNITS:
            text = head + unit * (size // len(unit))
            seconds = []
            for _ in range(3):  # the best of three, and of this process: not what else runs on the machine
                start = time.process_time()
                assert extract_choice(text, lenient) in (None, "A")
                seconds.append(time.process_time() - start)
                if seconds[-1] < limit:
                    break
            assert min(seconds) < limit, (head, unit)


def test_examples():
    results = doctest.testmod(reward)
    assert results.attempted and not results.failed
