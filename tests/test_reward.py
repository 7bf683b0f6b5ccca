import doctest
import time

import pytest

import reward
from reward import extract_choice, grade

STRICT = [
    (r"\boxed{A}", "A"),
    (r"so it is \boxed{ b }.", "B"),
    ("\\boxed{\n\tc\u3000}", "C"),
    (r"\boxed{A} no, wait: \boxed{D}", "D"),
    (r"\boxed{A} is \boxed{35}", "A"),  # the last box that holds exactly one letter, not the last box
    (r"\boxed{A} is \boxed{B", "A"),
    (r"\boxed{\boxed{C}}", "C"),
    (r"\boxed{A}}}", "A"),
    (r"\boxed{\text{B}}", None),
    (r"\boxed{(C)}", None),
    (r"\boxed{D.}", None),
    (r"\boxed {A}", None),
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


@pytest.mark.parametrize("label", "ABCD")
def test_grade(label):
    for letter in "ABCD":
        assert grade(rf"\boxed{{{letter}}}", label) == float(letter == label)
    assert grade(rf"\text{{{label}}}", label) == 0.0
    assert grade(rf"\boxed{{\text{{{label}}}}}", label) == 0.0  # the lenient reading is no reward


@pytest.mark.parametrize("label", ["", "AB", "a", "E", 0, None, ["A"]])
def test_grade_refuses_other_labels(label):
    with pytest.raises(ValueError, match="is not one of A, B, C, D"):
        grade(r"\boxed{A}", label)


UNITS = [
    "{", "}", "｛", "\\", "$", "(", " ", "\n", "A ", "A", "\0", "\ud800", "\U0001d400",
    r"\boxed", r"\boxed ", r"\boxed{", r"\boxed｛", r"\boxed{A", r"\boxed{A ", r"\boxed{ ",
    r"\boxed{\text{", r"\boxed{35}", r"\boxed{(", r"\text",
]


@pytest.mark.parametrize("lenient", [False, True])
@pytest.mark.parametrize("size, limit", [(100_000, 0.05), (1_000_000, 0.2)])
def test_any_text_takes_linear_time(lenient, size, limit):
    for head in ("", r"\boxed{", r"\boxed{A ", r"\boxed{(A"):
        for unit in UNITS:
            text = head + unit * (size // len(unit))
            seconds = []
            for _ in range(3):  # the best of three: other work on the machine is not what is measured
                start = time.perf_counter()
                assert extract_choice(text, lenient) in (None, "A")
                seconds.append(time.perf_counter() - start)
                if seconds[-1] < limit:
                    break
            assert min(seconds) < limit, (head, unit)


def test_examples():
    results = doctest.testmod(reward)
    assert results.attempted and not results.failed
