r"""What `accuracy_reward` calls right, and reward functions of one's own."""

# ruff: noqa: RUF001  (characters that look like others are tried here)
import math
import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
from support import ROOT, refusal

from common import reward
from common.answers import last_boxed
from common.reward import GRADER, call_reward_func, is_right, load_reward_funcs, reward_values
from common.task import Problem

DATA = ROOT.parent / "shared/data"


def verdicts(rows: list[tuple]) -> list[float]:
    """Returns the grades of rows: an answer, its gold answer and, if it matters, the problem."""
    problems = [Problem((*row, "")[2], row[1]) for row in rows]
    return GRADER.grade([f"So $\\boxed{{{row[0]}}}$." for row in rows], problems)


def misjudged(rows: list[tuple], verdict: float) -> list[tuple]:
    return [row for row, got in zip(rows, verdicts(rows), strict=True) if got != verdict]


# ---- The box -------------------------------------------------------------------------------------
BOXES = [
    (r"so \boxed{7}.", "7"), (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed {4}", "4"),
    (r"\boxed{1}. Or rather \boxed{2}", "2"), (r"\boxed{\boxed{3}}", "3"), (r"\boxed{}", ""),
    (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed{\left\{ x \right.}", r"\left\{ x \right."),
    (r"a \\\boxed{5}", "5"), (r"\\boxed{5}", "5"), ("\\boxed{a\nb}", "a\nb"),
    (r"} } \boxed{6} {", "6"), (r"\boxed{5} then \boxed{6", "5"), (r"\boxed{5 then {6}", None),
    (r"\boxed", None), (r"\boxed 7", None), (r"\fbox{7}", None), ("", None),
    # Boxes of one list, and boxes that are none.
    (r"$x = \boxed{3}$ or $x = \boxed{5}$", "3, 5"), (r"\boxed{3}\text{ and }\boxed{5}", "3, 5"),
    (r"$\boxed{3}$, $\boxed{4}$, and $\boxed{5}$", "3, 4, 5"), (r"\boxed{3},\boxed{5}", "3, 5"),
    ("$x_1=\\boxed{3}$\nor\n$x_2 = \\boxed{5}$.", "3, 5"), (r"\boxed{3}; \boxed{5}", "3, 5"),
    (r"\boxed{3} \quad \text{or} \quad \boxed{5}", "3, 5"), (r"\boxed{1/2} or \boxed{0.5}", "0.5"),
    (r"\(x = \boxed{3}\) or \(x = \boxed{5}\)", "3, 5"), (r"**\boxed{3}**, **\boxed{5}**", "3, 5"),
    (r"$\theta = \boxed{3}$ or $\theta = \boxed{5}$", "3, 5"),
    (r"\boxed{3} \lor \boxed{5}", "3, 5"), (r"$AB=\boxed{3}$ or $AB=\boxed{5}$", "3, 5"),
    (r"\boxed{3}. Or \boxed{5}", "5"),
    (r"I got \boxed{3}, but it is \boxed{5}", "5"), (r"\boxed{3} = \boxed{5}", "5"),
    (r"\boxed{2}, \boxed{3} or \boxed{4}? No: \boxed{3} or \boxed{5}", "3, 5"),
    # Thinking that never ends has no answer.
    (r"<think>maybe \boxed{7}? let me check", None), (r"<think>\boxed{7}</think> So 8", "7"),
    (r"<think>\boxed{7}</think> \boxed{8} <think> or \boxed{9}", "8"),
    (r"[THINK]\boxed{7}", None), (r"[THINK]a[/THINK]\boxed{7}", "7"), (r"◁think▷\boxed{7}", None),
    (r"<|channel|>analysis<|message|>\boxed{7}", None), (r"<seed:think>\boxed{7}", None),
    (r"<thinking>\boxed{7}", None), (r"<reasoning>\boxed{7}", None), (r"[Reasoning]\boxed{7}", "7"),
    (r"<|channel|>analysis<|message|>\boxed{7}<|end|>\boxed{8}", "8"),
    (r"<thought>\boxed{7}", None), (r"<|channel>thought\boxed{7}", None),
    (r"<|begin_of_thought|>a<|end_of_thought|>\boxed{7}", "7"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "content"), BOXES)
def test_last_boxed(text, content):
    assert last_boxed(text) == content


def test_half_of_a_list_is_not_right_and_its_order_does_not_matter():
    gold = last_boxed(r"$x = \boxed{3}$ or $x = \boxed{5}$")
    texts = [
        r"$x = \boxed{5}$, or $x = \boxed{3}$", r"\boxed{3, 5}", r"\boxed{3}", r"\boxed{5}",
        r"\boxed{3} or \boxed{4}", r"\boxed{3}, \boxed{5} and \boxed{7}",
    ]  # fmt: skip
    assert GRADER.grade(texts, [Problem("", gold)] * 6) == [1, 1, 0, 0, 0, 0]


# ---- Right and wrong answers ---------------------------------------------------------------------
RIGHT = [
    # numbers
    ("1,000", "1000"), ("+7", "7"), ("007", "7"), ("-0", "0"), (" 7. ", "7"), ("$7$", "7"),
    (r"\frac12", "0.5"), ("1/2", "0.5"), (r"\tfrac34", "0.75"), ("18.00", "18"), ("1/3", "2/6"),
    ("11111111100", r"11,\! 111,\! 111,\! 100"), (r"6.72 \times 10^{-5}", ".0000672"),
    (r"2\frac{1}{2}", r"\frac{5}{2}"), ("2 1/2", "2.5"), (r"-2\tfrac12", "-2.5"),
    (r"1\,000", "1000"), ("1{,}000", "1000"), ("12 345 678.5", "12345678.5"),
    (r"0.\overline{3}", r"\frac13"), (r"\approx 3.14", "3.14"), (r"10^2\cdot10^3", "100000"),
    ("1e5", "100000"), ("1E3", "1000"), ("1e-5", "0.00001"), ("(5)", "5"),
    ("1.5*10^8", "150000000"), ("1.5 x 10^8", "150000000"), ("6.02e+5", "602000"), ("7^{th}", "7"),
    (r"7\text{th}", "7"), (r"\bf 42", "42"), (r"\large 42", "42"),
    # a power, a root or an index binds before the division
    ("√3/2", r"\frac{\sqrt3}{2}"), (r"2\sqrt3/3", r"\frac{2\sqrt3}{3}"), (r"\sqrt 3/2",) * 2,
    (r"\sqrt 3/2", r"\frac{\sqrt3}{2}"), ("pi^2/6", r"\frac{\pi^2}{6}"), ("a_1/2", r"\frac{a_1}2"),
    ("x²/4 + y²/9 = 1", r"\frac{x^2}{4} + \frac{y^2}{9} = 1"), ("x-1/2", r"x-\frac12"),
    ("(1/2, √3/2)", r"\left(\frac12, \frac{\sqrt3}{2}\right)"), ("3/4.", "0.75"), ("-1/2", "-0.5"),
    # expressions, lists and sets
    ("5", "x=5"), ("x = 5", "5"), ("12=x", "12"), ("14 = f(3)", "14"),
    (r"2\sqrt{2} = AB", r"\sqrt8"), (r"12 = \text{total}", "12"), ("2+3=5=x", "5"),
    (r"\sqrt{8}", r"2\sqrt{2}"), ("-q + p", "p - q"),
    (r"(3, \pi/2)", r"\left( 3, \frac{\pi}{2} \right)"), ("5, 3, 7", "3, 5, 7"), ("S = s^2", "s^2"),
    ("[-2, 7]", r"x \in [-2,7]"), (r"x\ge0", r"[0,\infty)"), (r"-1 < x \leq 3", "(-1, 3]"),
    (r"1 + \sqrt{19}, 1 - \sqrt{19}", r"1 \pm \sqrt{19}"), ("(x+1)^2", "x^2+2x+1"),
    (r"\begin{bmatrix} 1 \\ 2 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"x = 4 \text{ or } x = 7", "4, 7"), (r"\{4, 7\}", "7, 4"), ("52_{8}", "52_8"),
    ("(x,y)=(2,3)", "(2,3)"), ("y = 3+2x", "y = 2x + 3"), (r"\varnothing", r"\emptyset"),
    (r"2\begin{pmatrix} .5 \\ 1 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    (r"\cos\frac{\pi}{5}", r"\frac{1+\sqrt{5}}{4}"), (r"\sqrt{5+2\sqrt6}", r"\sqrt2+\sqrt3"),
    (r"(0.\overline{3}, 1)", r"(\frac13, 1)"), ("(B) f(x)", "B"), ("B)", "B"),
    ("(D) I and II only", "D"),
    # units, nouns of the problem, words
    ("12 dollars", "12"), (r"12\,\mathrm{m}/\mathrm{s}^2", "12"), ("12", "12 dollars"),
    ("5 cm", r"5\text{ centimeters}"), (r"864\text{ square inches}", r"864 \mbox{ inches}^2"),
    ("60 mph", r"60\text{ miles per hour}"), ("90", r"90^\circ"), (r"30\degree", r"30^\circ"),
    (r"\$18", "18"), (r"\$18.00", "18", "She pays $3 a day for 6 days."), ("10 percent", r"10\%"),
    (r"10\%", "0.1"), (r"3\text{ dozen}", "36"), ("1.2 million", "1200000"),
    (r"12\text{ apples}", "12", "Ann has 5 apples and buys 7 more."),
    (r"\textbf{even}", r"\text{even}"), (r"\text{Yes!}", "Yes"), (r"\text{C)}", r"\text{(C)}"),
    ("Even", r"\text{even}"), ("Evelyn", r"\text{Evelyn}"),
    # one character where there are many, and Markdown
    (r"\text{(B)}\ 20^\circ C", "B"), (r"(B) \angle A", "B"), ("(C) 5 V", "C"),
    (r"(C) \text{ Plan } B", "C"), ("x = 3 \\cdot 4 = 12", "12"), (r"A = \pi r^2 = 9\pi", r"9\pi"),
    ("E: text", "E"), ("E) text", "E"), (r"\textbf{(E)}", "E"), (r"\text{(C) } 20", "C"),
    ("**E**", "(E)"), ("pi/2", r"\frac{\pi}{2}"), ("exp(16)", "e^{16}"), ("2sqrt(3)", r"\sqrt{12}"),
    ("**73**", "73"), ("`73`", "73"), ("７３", "73"), ("٧٣", "73"), ("७३", "73"), ("73。", "73"),
    ("7\u200b3", "73"), ("\ufeff73", "73"), ("–73", "-73"), ("−73", "-73"), ("—73", "-73"),
    ("－73", "-73"), ("１／２", "0.5"), ("３，４", "4, 3"), ("½", "0.5"), ("2½", r"\frac{5}{2}"),
    ("3⁄4", "0.75"), ("x²+1", "x^2+1"), ("x₁", "x_1"), ("3√15", r"3\sqrt{15}"),
    ("𝑥 ≤ ３", r"x \le 3"), ("(−∞, 3]", r"(-\infty, 3]"), ("(1,2) ∪ (3,4)", r"(1,2)\cup(3,4)"),
    ("30°", r"30^\circ"), (r"\(73\)", "73"), ("*73*", "73"), ("__73__", "73"), ("***73***", "73"),
    ("x**2 + y**2", "x^2+y^2"), ("2**10", "1024"), ("10⁻³", "0.001"), ("x¹²", "x^{12}"),
    ("15₁₆", "15_{16}"), ("arctan(2)", r"\arctan 2"), (r"\text{All real numbers}", r"\mathbb{R}"),
    (r"\textbf{(B)}\ (1,2)", "B"), ("ln(2)", r"\ln 2"), ("sin(x)", r"\sin x"),
    # a base, sets with gaps, words in capitals, labels, and scales that the problem asks for
    (r"\log_2 3 + 1", r"1+\log_{2}3"), (r"\log_2 5", r"\log_{2}5"), ("TRUE", "True"), ("NO", "No"),
    (r"\mathbb{R}\setminus\{2\}", r"(-\infty,2)\cup(2,\infty)"), (r"\text{False}", "FALSE"),
    (r"(-\infty,2)\cup(2,3)\cup(3,\infty)", r"\mathbb{R}\setminus\{2,3\}"), ("x≠2", r"ℝ - \{2\}"),
    (r"x \ne 2, x \ne 3", r"\mathbb{R} \setminus \{3, 2\}"), ("0.1x+0.2x", "0.3x"),
    (r"\text{Total: }12", "12", "Find the total."), (r"f'(x) = 2x", "2x"), ("(.5, 1)", "(1/2,1)"),
    (r"20\%", "20", "What percent of 50 is 10?"), ("3 dozen", "3", "How many dozen eggs?"),
    (r"12\text{ dozen}", "144", "Eggs are $3 a dozen. How many eggs are $36?"),
    (r"\text{Area} = 12", "12", "Find the area."), (r"\frac{24}{52!}", r"\frac{4!}{52!}"),
    (r"\$45", "45", "Ali keeps his bills in his wallet. How much money does he have?"),
    (r"\$\,45", "45", "Bo has 15 quarters. How much do 3 socks cost?"),
    (r"\$45", "45", "The number of people in a shop is 9. They pay $5 each. How much is that?"),
    (r"25\text{ minutes}", "25", "Ann cooks for 5 minutes. Find the number of eggs in 5 pots."),
    (r"25\%", r"\frac14", "A shop separates balls. What is the probability that it is red?"),
    (r"\left(5\right)", "5"), (r"\frac{ 1 }{ 3 }", r"\frac13"), (r"\frac{1} {3}", r"\frac13"),
    (r"\left(\frac{1}{3}\right)", r"\frac13"),
    # a formula of the problem that is the answer
    (r"\dfrac{3}{4}", r"\frac34", r"Which is larger, $\frac34$ or $\frac{2}{3}$?"),
    ("0.5", r"\frac12", "A cube weighs 0.5 kg. What is the chance of a 1?"),
    ("0.5", r"\frac12", "[asy]draw((0.5,0));[/asy] What fraction is red?"),
    (r"\sin 30^\circ = \frac12", r"\cfrac{1}{2}", r"Compute $\sin 30^\circ$."),
    ("m^2 + n^2 = 17", "17", "Find $m^2+n^2$."),
    # parts by name, unit or order
    ("y=2, x=1", "(1, 2)"), ("1, 2", "(1, 2)", "Find the ordered pair."), ("(1, 2)", "x=1, y=2"),
    ("b=1, m=2", "(2, 1)", "Find (m,b)."), (r"r=2, \theta=1", "(2, 1)"), ("x=2, 1", "x=1, x=2"),
    ("(x, y) = (1, 2)", "x=1, y=2"),
    (r"5\text{ in}, 3\text{ ft}", r"3\text{ ft}, 5\text{ in}"), ("5, 3", "x=3, x=5", "Solve it."),
    (r"3\text{ h }5\text{ min}", r"3\text{ hours and }5\text{ minutes}"), ("x_1=5, x_2=3", "3, 5"),
    (r"\text{Bob and Ann}", r"\text{Ann, Bob}"), ("(2,1), (1,2)", "(1,2),(2,1)", "Ordered pairs?"),
    ("1 < 2 < 3", "1, 2, 3", "Sort 2, 3, 1."), ("3, 1", "1, 3", "Find the roots in any order."),
    # names
    (r"\angle BAC = 90^\circ", r"90^\circ", "Find angle BAC."), (r"\angle ABC = 60^\circ", "60"),
    ("BA = 3", "AB = 3"), ("P(B) = 0.3", r"P(B) = \frac{3}{10}"), (r"\text{Area}=3", "A = 3"),
    # units of the gold answer, left out or in another spelling
    (r"12\text{ km/h}", "12 km/h"), ("12", "12 km/h"), (r"5\,\mathrm{m}", "5 m"), ("5", "5 s"),
    (r"9.8\text{ m/s}^2", "9.8 m/s^2"), ("4.5", "4.5 kWh"), (r"\$15/hour", "$15/hour"),
    (r"20^\circ\text{C}", "20°C"), (r"12\frac{\text{km}}{\text{h}}", "12 km/h"), ("5m", "5 m"),
    (r"12\ \mathrm{km/h}", "12 km/h"), (r"5\text{ meters}", "5 m", "A rope of 20 m has 4 parts."),
    (r"5\text{ kilowatt-hours}", "5 kWh"), (r"9.8\frac{\text{m}}{\text{s}^2}", "9.8 m/s^2"),
    # other spellings
    ("{5}", "5"), (r"{\frac{1}{2}}", "0.5"), ("{1, 2}", "2, 1"), (r"\text{Option C}", "C"),
    ("(c)", "C", "(A) 1 (B) 2 (C) 3"), ("c", r"\text{(C)}", r"A. 1 B. 2 C. 3"),
    (r"\text{The answer is } 5", "5"), (r"\text{Answer: }5", "5"), (r"\text{The answer is C}", "C"),
    (r"3:00\text{ p.m.}", "3:00 PM"), (r"4:30 \text{ p.m.}", r"\text{4:30 p.m.}"),
    ("07:45", "7:45"), ("2x+c", "2x+C", r"Find $\int 2\,dx$."), (r"\frac{1}{2^{100}}", "2^{-100}"),
    ("5:3", "5/3", "What is the ratio?"), (r"5\text{ to }3", "5:3", "What is the ratio?"),
    (r"y\log_5 2", r"y \cdot \log_5 2"), (r"\log_5 2 \cdot y", r"y\log_5 2"),
    # another form than the problem has
    ("(x+3)(x-3)", "(x-3)(x+3)", "Factor x² - 9."), ("(x+1)x", "x(x+1)", "Factor $x^2+x$."),
    ("0.75", r"\frac34", "By what factor does it shrink?"), ("0.5", "0.5", "Which is 0.5?"),
]  # fmt: skip
WRONG = [
    ("7", "8"), ("", "7"), ("-7", "7"), ("0.33", r"\frac13"), ("0", "0.0000001"),
    ("0", r"1.6\times10^{-19}"), (r"6.7\times10^{-34}", r"1\times10^{-40}"), ("1e-20", "1e-21"),
    ("12345678901234567890123456789", "12345678901234567890123456788"), ("18.01", "18"),
    ("x" * 501, "7"), (".0000674", ".0000672"), (r"0.\overline{30}", r"\frac13"), ("1e3", "1"),
    ("1e5", "10000"), ("1E3", "100"), ("1e-5", "0.0001"), ("(6)", "5"),
    # what is left to compute, and numbers side by side
    ("40 + 2", "42"), (r"21 \cdot 2", "42"), ("40 2", "42"), ("(40)(2)", "42"), (r"40\,2", "42"),
    (r"40\text{ }2", "42"), ("40{2}", "42"), ("-40 82", "42"), (r"\frac{80}{2} 2", "42"),
    ("1 00", "1"), (r"\sqrt{40 2}", r"\sqrt{42}"), ("(40 2, 1)", "(42, 1)"), ("5'10", "510"),
    # letters are no unit, and what a root or a power holds
    ("2", "2xyz"), ("6", "6abc"), ("2", "2lnx"), ("√3/2", r"\sqrt{\frac32}"), ("x^2/3", "x^{2/3}"),
    # other values
    (r"\frac13", "0.5"), ("x=6", "5"), (r"\sqrt{7}", r"2\sqrt{2}"), ("q - p", "p - q"),
    (r"(\frac{\pi}{2}, 3)", r"\left( 3, \frac{\pi}{2} \right)"), ("3, 5", "3, 5, 7"),
    ("[-2, 7)", r"x \in [-2,7]"), ("x^2+2x+2", "(x+1)^2"), ("101_2", "101_3"), ("10_8", "10"),
    (r"\begin{bmatrix} 2 \\ 1 \end{bmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"),
    ("2x=12", "12"), ("13=12", "12"), (r"\{1,2\}", "(1,2)"), ("x>0", r"[0,\infty)"), ("y=7x", "7"),
    ("x_1=-5, x_2=3", "-5"), ("0", r"\text{no solution}"), ("-i", "i"), ("A, B", "B"),
    # hedges
    ("7, 8", "7"), ("42, 42", "42"), (r"x=4\lor x=7", "4"), (r"42\text{ and }43", "42"),
    (r"\text{Monday} \text{ or } \text{Tuesday}", r"\text{Monday}"), ("12 or more", "12"),
    (r"\text{(C) or (B)}", r"\text{(C)}"), (r"12\text{ is wrong}", "12"),
    (r"\textbf{(C)} and \textbf{(B)}", "C"),
    # units and words
    ("5 m", r"5\text{ centimeters}"), ("5 m", "5", "Find the height in cm."), ("12 million", "12"),
    (r"15\text{ cm}", r"15\mbox{ cm}^2"), (r"\$5.4", r"5.4\text{ cents}"), ("12 percent", "12"),
    (r"12\text{ apples}", "12"), ("12 squared", "12"), (r"12\text{k}", "12"), ("12ab", "12"),
    (r"12\text{ apples or }\frac{26}{2}", "12", "Ann has 12 apples."), ("€18.90", r"\$18.90"),
    (r"0.1\%", "0.1"), (r"20^\circ\text{F}", r"20^\circ\text{C}"), (r"7\text{ a.m.}", "7 p.m."),
    (r"30\text{ hours}", "30", "Tom works in his shop. How many minutes does he need?"),
    (r"30\text{ s}", "30", "How many minutes does Tom's dog bark?"),
    (r"8\%", "8", "A shop separates balls. How heavy is one?"),
    (r"\$75", "75", "A sock costs 15 cents. How much do 5 of them cost?"),
    # what stands before the value, or scales it
    ("minus 8", "8", "What is 12 minus 4?"), (r"\text{less than } 8", "8", "Less than 12 by 4?"),
    (r"\text{half of } 8", "8", "Half of 16?"), (r"\text{not } x", "x", "What is not y?"),
    (r"8\text{ dozen}", "8", "Eggs are $3 a dozen. How many dollars?"), ("8 @", "8"),
    (r"8\text{ squared}", "8", "What squared is 64?"), (r"8\%", "8", "What is 8% of 100?"),
    (r"x\text{ minus }y", "xy", "What is x minus y?"), ("(2, twice 3)", "(2, 3)", "Twice?"),
    # several choices, and a letter's two values
    ("(C) 20, D 30", "C"), ("(C)3(D)4", "C"), ("(C) or D?", "C"), ("(C) D = 4", "C"),
    (r"(C) 3 \text{ (or } D 4)", "C"), ("x = 9 = 8", "8"), ("f(2) = 3 = 4", "4"),
    ("C) 3, D) 4", "C"), ("C. D.", "C"), ("C: 3 D: 4", "C"), ("(C) 3, (D) 4", "C"),
    (r"\textbf{(C)} 3, \textbf{(D)} 4", "C"), ("x=-2, x=2", "(-2,2)"), ("12", "12_5, 13_5"),
    ("12_7, 13_7", "12_5, 13_5"), ("(C)/(D)", "C"), ("(C) 3 D", "C"),
    # what math-verify drops by default: small factors, digits after the sixth, cases, marks
    (r"\frac{7}{2^{101}}", r"\frac{2^{100}+1}{3\cdot 2^{101}}"), ("(0, 10^{-20})", "(0, 10^{-30})"),
    (r"\frac{1}{2^{99}}", r"\frac{1}{2^{98}}"), (r"\frac{x}{2^{99}}", r"\frac{x}{2^{98}}"),
    (r"\frac{4!}{52!}", r"\frac{5!}{52!}"), ("(0.0000001, 1)", "(0.0000002, 1)"), ("0", "R-r"),
    ("2^{1000}", "2^{1000}+1"), (r"8\fbox{\sqrt7}", r"\sqrt7"), ("1.414214", r"\sqrt2"),
    ("e^{-100}", "e^{-50}"), (r"x\ne2, x\ne3", r"\mathbb{R}"), ("2r+R", "2R+r"), ("2", "2^T"),
    ("f'(x)", "f(x)"), ("11 2", "22"), ("1", r"1-\frac{1}{2^{60}}"), (r"\log_2 3 4", r"4\log_2 3"),
    # characters: the same forms with another value
    ("D: text", "E"), ("D) E", "E"), (r"\textbf{(D)}", "E"), ("(E) or (D)", "E"), ("E, D", "E"),
    ("3pi/2", r"\frac{\pi}{2}"), ("exp(15)", "e^{16}"), ("2sqrt(2)", r"\sqrt{12}"),
    ("**74**", "73"), ("７４", "73"), ("٧٤", "73"), ("7\u200b4", "73"), ("–73", "73"),
    ("1–73", "73"), ("⅓", "0.5"), ("2½", "1"), ("2½", "21"), ("3²", "32"), ("x²", "x^3"),
    ("√2", "2"), ("2**9", "1024"), ("10⁻²", "0.001"), ("x¹³", "x^{12}"),
    ("x ≥ 3", r"x \le 3"), ("π", r"2\pi"), ("12‰", "12"),
    # the problem's own formula
    ("99^2+99+1", "9901", "Compute $99^2 + 99 + 1$."), ("x^2+x", "x(x+1)", "Factor $x^2 + x$."),
    ("x^2<4", "(-2,2)", "Find all x with $x^2<4$."), ("x+1=4", "x=3", "Solve $x+1=4$."),
    ("6/8", r"\frac34", "Write 6/8 in lowest terms."), ("√12", r"2\sqrt3", "Simplify √12."),
    ("x^2 - 9", "(x-3)(x+3)", "Factor x² - 9."), ("1,000/50", "20", "Compute 1,000/50."),
    ("0.5", r"\frac12", "Express 0.5 as a ratio."), ("64", "2^6", "Factor 64 into primes."),
    ("3/4", "0.75", "Write 3/4 as a decimal."), ("45%", "0.45", "Write 45% as a decimal."),
    ("0.00012", r"1.2\times10^{-4}", "Write 0.00012 in scientific notation."),
    (r"\frac{12}{18}", r"\frac23", "Compute 12÷18."), (r"xx^2", "x^3", r"Simplify $x \cdot x^2$."),
    (r"6/\sqrt3", r"2\sqrt3", r"Rationalize $\frac{6}{\sqrt{3}}$."),
    ("2x - y = -1", "y=2x+1", "Solve $2x-y=-1$ for y."),
    # not factored, or not expanded
    ("1(x^2+3x+2)", "(x+1)(x+2)", "Factor x^2+3x+2."), ("2(x^2-9)", "2(x-3)(x+3)", "Factor it."),
    ("2+3x+x^2", "(x+1)(x+2)", "Factor x^2+3x+2."), ("1(x^2+x)", "x(x+1)", "Factor $x^2+x$."),
    ("1(x(x+3)+2)", "(x+1)(x+2)", "Factor x^2+3x+2."), ("(x+1)(x+1)", "x^2+2x+1", "Expand it."),
    # order, pairs and names
    ("3, 1, 2", "1, 2, 3", "Sort 2, 3, 1."), ("D, B, A", "A, B, D", "In which order are A, B, D?"),
    ("3 > 2 > 1", "1, 2, 3", "Sort 2, 3, 1."), ("5, 2", "2, 5", "Find $a$ and $b$."),
    (r"5\text{ ft}, 3\text{ in}", r"3\text{ ft}, 5\text{ in}"), ("y=1, x=2", "(1, 2)"),
    (r"5\text{ h }3\text{ min}", r"3 \text{ hours and } 5 \text{ minutes}"), ("(1, 2)", "x=1, x=2"),
    (r"\text{fig, pear}", r"\text{pear, fig}", "Sort fig and pear by weight."),
    ("1, 2", "(1, 2)", "Where is it negative?"), (r"\{1, 2\}", "(1, 2)", "Find the ordered pair."),
    ("1, 2", "(1, 2)", "On which interval is the y of the point (x, y) negative?"),
    ("(2, 1)", "x=1, y=2"), ("2, 1", "x=1, y=2"), ("(x, y) = (2, 1)", "x=1, y=2"),
    ("b=2, m=1", "(2, 1)", "Find (m,b)."),
    ("x=1, x=2", "(1, 2)", "Find the ordered pair."),
    ("y = 3", "x = 3"), ("P(A) = 0.3", "P(B) = 0.3"), ("P(A|B) = 0.3", "P(B|A) = 0.3"),
    (r"\angle ABC = 60^\circ", r"\angle BCA = 60^\circ"),
    # units, times and choices; a letter of the problem is no unit
    (r"5\text{ km}", "5 m"), ("3:00", "3:00 PM"), ("8:60", "4:30", "When?"), ("5", "5x"),
    ("5", "5 m", "What is $2 m + 3 m$?"), ("4", "4 s", "Give the perimeter of a square of side s."),
    (r"5\text{ kW}", "5 kWh"), (r"3:00\text{ a.m.}", "3:00 PM"), ("1:3:2", "1:2:3", "Which ratio?"),
    (r"\text{The answer is not }5", "5"), ("(d)", "C", "(A) 1 (B) 2 (C) 3 (D) 4"), ("c", "C"),
    ("x+k", "x+C", "Add $x$ and $C$."), (r"\log_5 2y", r"y\log_5 2"), ("{4}{2}", "42"),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "grade"), [(RIGHT, 1.0), (WRONG, 0.0)], ids=["right", "wrong"])
def test_right_answers_earn_1_and_wrong_ones_0(rows, grade):
    assert misjudged(rows, grade) == []


def test_every_step_of_a_solution_must_be_right():
    """Slips that cancel (23 + 19 = 43, doubled 84) earn nothing."""
    text = "We begin at 23. Adding 19 gives 42. We double it and get 1,084. So \\boxed{1084}."
    chain = Problem("", "1084", (42, 1084))
    own = Problem("23 + 19, and so on", "1084", (42, 1084), opening=0)
    assert GRADER.grade([text, text], [chain, own]) == [1.0, 0.0]
    assert GRADER.grade([text.removeprefix("We begin at 23. ")] * 2, [chain, own]) == [0.0, 1.0]
    slips = [
        text.replace("42", "43"), text.replace("42", "42.5"), text.replace("42", "-42"),
        text.replace("1,084", "184"), text.replace("Adding 19 gives 42. ", ""),
        text.replace("{1084}", "{1085}"), text.replace("So \\boxed{1084}.", ""),
    ]  # fmt: skip
    assert GRADER.grade(slips, [chain] * len(slips)) == [0.0] * len(slips)


def test_the_grade_for_reward_functions_and_that_where_the_gold_answer_is_missing():
    chat = [{"role": "assistant", "content": "\\boxed{16 apples}"}]
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 apples?"}]
    assert is_right(chat, "16", asked) and is_right("\\boxed{16 apples}", "16", "2 apples?")
    assert not is_right(chat, "16") and not is_right("16", "16") and not is_right("\\boxed{}", "")
    assert math.isnan(verdicts([("7", "")])[0])


# ---- Real problems -------------------------------------------------------------------------------
def real(name: str) -> list[tuple[str, Problem]]:
    """Returns solutions of a file of ../shared/data, as completions, and their problems."""
    from common.data import parse_rows, read_splits

    if not (DATA / name).exists():
        pytest.skip(f"{DATA / name} is absent: real problems are no part of the repository")
    problems = parse_rows(read_splits(str(DATA / name), None)["train"], name)
    found = []
    for problem in problems:
        text = problem.columns.get("solution") or problem.columns["answer"]
        found.append((re.sub(r"#### (.*)", r"\\boxed{\1}", text), problem))
    return found


@pytest.mark.parametrize(
    "name",
    [
        "math500.jsonl",
        "gsm8k_test.jsonl",
        pytest.param("gsm8k_train.jsonl", marks=pytest.mark.slow),
    ],
)
def test_solutions_of_real_problems_are_right(name):
    texts, problems = zip(*real(name), strict=True)
    grades = GRADER.grade(texts, problems)
    assert len(grades) >= 500
    missed = [p.answer for p, grade in zip(problems, grades, strict=True) if grade != 1.0]
    assert missed == []


# Of MATH-500 nearly every pair needs the worker.
@pytest.mark.parametrize(
    "name", ["gsm8k_test.jsonl", pytest.param("math500.jsonl", marks=pytest.mark.slow)]
)
def test_answers_of_other_problems_are_wrong(name):
    """Each problem's solution is judged by the answer of the next one."""
    texts, problems = zip(*real(name), strict=True)
    following = problems[1:] + problems[:1]
    asked = [a._replace(answer=b.answer) for a, b in zip(problems, following, strict=True)]
    grades = GRADER.grade(texts, asked)
    answers = [(a.answer, b.answer) for a, b in zip(problems, asked, strict=True)]
    paid = {pair for pair, grade in zip(answers, grades, strict=True) if grade}
    assert {(own, other) for own, other in paid if own != other} <= {("5", "x=5")}


@pytest.mark.slow
def test_gold_answers_written_otherwise_are_right():
    """By math-verify and the rules, where equal texts decide nothing."""
    rows = []
    for _, problem in real("math500.jsonl"):
        other = problem.answer.replace("\\frac", "\\dfrac").replace("\\left", "")
        rows.append(("\\displaystyle " + other.replace("\\right", ""), problem.answer))
    assert misjudged(rows, 1.0) == []


# ---- Reward functions ----------------------------------------------------------------------------
CHAT = [{"role": "user", "content": "2 + 2?"}]


def called(function, problems=None, texts=("x", "yy"), logged=None) -> list[float]:
    """Returns what a reward function gives to two completions."""
    problems = problems or [Problem("a", "1"), Problem("b", "2")]
    ids = [[1] * len(text) for text in texts]
    return call_reward_func(
        "mine", function, problems, texts, ids, {} if logged is None else logged
    )


def test_reward_functions_come_from_dotted_paths_and_have_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "kit_of_test_reward").mkdir()
    (tmp_path / "kit_of_test_reward/inner.py").write_text("def length(**_):\n    return [1]\n")
    paths = ["accuracy_reward", "kit_of_test_reward.inner.length", "math.prod"]
    functions, weights, _ = load_reward_funcs(paths, [0.5, -1.0, 2.0])
    assert list(functions) == ["accuracy_reward", "length", "prod"]
    assert functions["accuracy_reward"] is None and functions["length"]() == [1]
    assert weights.tolist() == [0.5, -1.0, 2.0]
    load_reward_funcs(["math.prod"], None)
    assert sys.modules["kit_of_test_reward.inner"].length is functions["length"]  # it stays
    assert load_reward_funcs(paths, None)[1].tolist() == [1.0, 1.0, 1.0]
    for wrong, weights in (
        (["math.prod", "math.prod"], None),
        (paths, [1.0, 2.0]),
        (paths, [1.0, 2.0, 3.0, 4.0]),
        (paths, [1.0, 2.0, math.nan]),
    ):
        assert "must have different names" in refusal(load_reward_funcs, wrong, weights)
    for wrong in ("prod", "math.pro", "no_such_module_of_test.prod"):
        said = refusal(load_reward_funcs, [wrong], None, error=RuntimeError)
        assert f"the reward function {wrong} has" in said


def test_a_reward_module_neither_ends_the_program_nor_moves_it(tmp_path, monkeypatch):
    """By sys.exit(0) at its end a run would succeed without training."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "elsewhere_of_test.py").write_text(
        "import os\nos.chdir('/')\nfrom math import prod\n"
    )
    load_reward_funcs(["elsewhere_of_test.prod"], None)
    assert Path.cwd() == tmp_path
    (tmp_path / "leaves_of_test.py").write_text("import sys\nsys.exit(0)\n")
    said = refusal(load_reward_funcs, ["leaves_of_test.pay"], None, error=RuntimeError)
    assert "leaves_of_test.pay has ended the program" in said


def test_a_reward_function_gets_what_trl_gives_it():
    seen = {}

    def function(prompts, completions, completion_ids, **columns):
        assert callable(columns.pop("log_metric"))
        seen.update(columns, prompts=prompts, completions=completions, ids=completion_ids)
        return [0, True]

    def with_few_arguments(completions, level, **_):
        return level

    problems = [Problem("a", "3", (), {"level": 1}), Problem("b", "", (), {"level": None})]
    assert called(function, problems) == [0.0, 1.0]
    assert seen == {
        "prompts": ["a", "b"], "completions": ["x", "yy"], "ids": [[1], [1, 1]],
        "gold": ["3", ""], "level": [1, None],
    }  # fmt: skip
    called(function, [Problem(CHAT, "4")] * 2)
    assert seen["prompts"] == [CHAT, CHAT]
    assert seen["completions"] == [[{"role": "assistant", "content": t}] for t in ("x", "yy")]
    assert called(with_few_arguments, problems[:1] * 2) == [1.0, 1.0]
    called(function, [Problem("a", answer, (), {"gold": "a column"}) for answer in ("3", "")])
    assert seen["gold"] == ["3", "a column"]  # README promises the answers


def test_a_reward_function_gets_copies():
    """Of the data, and for each completion of a group its own."""

    def edit(prompts, completions, completion_ids, levels, **_):
        for cells in (prompts[0], completions[0], completion_ids[0], levels[0]):
            cells.clear()
        assert (prompts[1], levels[1]) == (CHAT, ["easy"])
        levels.clear()
        return [1, 2]

    problems = [Problem(list(CHAT), "4", (), {"levels": ["easy"]})] * 2
    assert called(edit, problems) == [1.0, 2.0]
    assert problems == [Problem(CHAT, "4", (), {"levels": ["easy"]})] * 2


KINDS_OF_NUMBERS = [
    [1, 0.5], (True, 0.5), iter([1, 0.5]), numpy.array([1, 0.5]), torch.tensor([1, 0.5]),
    [numpy.float32(1), torch.tensor(0.5)], torch.tensor([1, 0.5], dtype=torch.bfloat16),
]  # fmt: skip


@pytest.mark.parametrize("values", KINDS_OF_NUMBERS, ids=range(len(KINDS_OF_NUMBERS)))
def test_rewards_may_be_numbers_of_any_kind(values):
    assert called(lambda **_: values) == [1.0, 0.5]


def test_none_is_no_judgement():
    found = called(lambda **_: [1, None])
    assert found == pytest.approx([1.0, math.nan], nan_ok=True)


NO_REWARDS = [
    [math.nan, 1], {"a": 1, "b": 2}, {0: 1, 1: 2}, [1.0], [1, 2, 3], [], [1.0, 1e39],
    [-math.inf, 1], [1j, 1], [1, []], [1.0, "x"], None, 1.0, [10**400, 1], torch.tensor(1.0),
]  # fmt: skip


@pytest.mark.parametrize("values", NO_REWARDS, ids=lambda values: str(values)[:20])
def test_what_is_no_list_of_finite_numbers_is_refused(values):
    said = refusal(called, lambda **_: values, error=(RuntimeError, SystemExit))
    assert "the reward function mine " in said


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_reward_function_that_fails_exits_or_is_async_is_named():
    """After an exit with code 0 the run would look finished."""

    async def later(**_):
        return [1.0, 2.0]

    def exits_later(**_):
        yield 1.0
        sys.exit(0)

    for function, says in (
        (later, "coroutine"),
        (lambda: [1, 2], "unexpected keyword"),
        (exits_later, "ended the program"),
    ):
        said = refusal(called, function, error=RuntimeError)
        assert re.search(f"the reward function mine has .*{says}", said)


def test_several_rewards_are_summed_by_their_weights():
    def level(level, **_):
        return level

    problems = [Problem("2 + 2?", "4", (), {"level": 3.0}), Problem("3?", "6", (), {"level": None})]
    problems.append(problems[1])
    functions = {"level": level, "accuracy_reward": None, "none": lambda **_: [None] * 3}
    logged = {}
    texts = ["\\boxed{4}", "\\boxed{6}", "\\boxed{7}"]
    values = reward_values(functions, problems, texts, [[1], [1], [1]], logged)
    assert values.nan_to_num(-1).tolist() == [[3, 1, -1], [-1, 1, -1], [-1, 0, -1]]
    assert values.dtype == torch.float64
    weights = torch.tensor([0.5, 2.0, 9.0], dtype=torch.float64)
    assert reward.weighted_sum(values, weights).tolist() == [3.5, 2.0, 0.0]
    assert reward.weighted_sum(values[:, 2:], weights[2:]).isnan().all()
    assert reward.log_means(logged) == {  # of what is judged
        "sampled_completions": 3, "rewards/level/mean": 3.0,
        "rewards/accuracy_reward/mean": pytest.approx(2 / 3),
    }  # fmt: skip


def test_numbers_that_a_reward_function_logs():
    def by_name(completions, log_metric, **_):
        log_metric("length", 3)
        log_metric(metric="length", value=5.0)
        log_metric("mean", 7)  # not that of the rewards
        return [1, 2]

    logged: dict = {}
    called(by_name, logged=logged)
    assert logged == {"rewards/mine/length": [3.0, 5.0], "rewards/mine/logged_mean": [7.0]}


def test_ready_made_functions_of_trl_run_unchanged():
    rewards = pytest.importorskip("trl.rewards", reason="pip install trl")
    texts = ["<think>2 + 2</think> \\boxed{4}", "\\boxed{4}"]
    problems = [Problem(CHAT, "4", (), {"solution": "$4$"})] * 2
    assert called(rewards.think_format_reward, problems, texts) == [1.0, 0.0]
    assert called(rewards.reasoning_accuracy_reward, problems, texts) == [1.0, 0.0]
    overlong = rewards.get_soft_overlong_punishment(max_completion_len=4, soft_punish_cache=2)
    assert called(overlong, texts=("xxxxx", "x")) == [-1.0, 0.0]


def test_a_call_holds_whole_groups(run_main, tmp_path):
    """In the rollout, in evaluations and in the trial at the start, whatever is sampled at once."""
    path = tmp_path / "groups_of_test_reward.py"
    path.write_text(
        "import itertools\n"
        "def f(prompts, completions, **_):\n"
        "    groups = [len(list(g)) for _, g in itertools.groupby(prompts, key=str)]\n"
        "    open('calls.txt', 'a').write(f'{sorted(groups)}\\n')\n"
        "    return [len(c) for c in completions]\n"
    )
    flags = {"per_device_rollout_batch_size": 3, "num_generations_eval": 2, "max_steps": 1}
    run_main(reward_funcs="groups_of_test_reward.f", **flags)
    calls = set((tmp_path / "calls.txt").read_text().splitlines())
    assert calls == {"[4]", "[4, 4]", "[2, 2]"}
