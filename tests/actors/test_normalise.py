from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.normalise import SpokenText

SPOKEN = SpokenText()

ENGLISH = {
    "3.5 km": "three point five kilometers",
    "$1,200": "one thousand two hundred dollars",
    "It costs $1,200.50 today.": "It costs one thousand two hundred dollars and fifty cents today.",
    "2026-11-29": "November twenty-ninth, twenty twenty-six",
    "10%": "ten percent",
    "3:45 pm": "three forty-five PM",
    "We meet at 3:45 p.m. on May 5, 2024.": "We meet at three forty-five PM on May fifth, twenty twenty-four.",
    "Dr. Smith lives 60 km/h away.": "Doctor Smith lives sixty kilometers per hour away.",
    "The 1st and the 22nd": "The first and the twenty-second",
    "1/2 a cup at 5°C": "one half a cup at five degrees Celsius",
    "£3.50 and €5 million": "three pounds and fifty pence and five million euros",
    "**Two** things: 2 and 3.": "Two things: two and three.",
    "٣ apples": "three apples",
}
CHINESE = {
    "2026年11月29日": "二零二六年十一月二十九日",
    "1.5倍": "一点五倍",
    "电话 123": "电话 幺二三",
    "请拨打010-8888,分机号是 15。": "请拨打零幺零八八八八,分机号是 幺五。",
    "我有3个苹果,价格是$1,200。": "我有三个苹果,价格是一千二百美元。",
    "他在1998年买了3.5kg": "他在一九九八年买了三点五千克",
    "10%的人,下午3:45": "百分之十的人,下午三点四十五分",
    '他说“2个”\\"3个"。': '他说“两个”\\"三个"。',
    "今天走了 3.5 km。": "今天走了 三点五公里。",
    "3²和1,234,567": "三²和一百二十三万四千五百六十七",
}
MIXED = {
    "他说 It costs $1,200 today 对吗2次": "他说 It costs one thousand two hundred dollars today 对吗二次",
    "你好2次。 I have 3 cats. 我有3只猫。": "你好二次。 I have three cats. 我有三只猫。",
    "这是 iPhone 15 Pro。 10%": "这是 iPhone 十五 Pro。 百分之十",
    "We like 3 things! 10%": "We like three things! ten percent",
}


@pytest.mark.parametrize("written", ENGLISH | CHINESE | MIXED)
def test_it_is_written_as_it_is_said(written: str) -> None:
    assert SPOKEN(written) == (ENGLISH | CHINESE | MIXED)[written]


@pytest.mark.parametrize(
    "text", ["", " \n", "Hello, world! It's fine.", "你好，世界。", " 我们 ", "“Yes” - no", "<|im_end|>"]
)
def test_what_has_nothing_to_write_out_stays(text: str) -> None:
    assert SPOKEN(text) == text


def test_figures_alone_are_of_the_language_before_them() -> None:
    assert SPOKEN(" 10%", "他给了我一个数。") == " 百分之十"
    assert SPOKEN(" 10%", "Here is a number.") == SPOKEN(" 10%") == " ten percent"


@settings(max_examples=150, deadline=None)
@given(
    st.text(
        st.sampled_from("0123456789年月日倍个元的是我ABCkmg .,:-/%$€¥°()（），。！？“”\"'\\{}[]<>|&*#\n\x00é٣०½²😀한か")
    )
)
def test_any_text_is_read_and_no_word_is_lost(text: str) -> None:
    said = SPOKEN(text)
    assert not (re.search(r"[0-9]", said) and re.fullmatch(r"[0-9一-鿿 ]+", text))
    assert all(each in said for each in re.findall("[的是我한]", text))


@pytest.mark.parametrize("text", ["\\pi r² is the area", "3 \\times 10⁸ m/s", "\\Delta E = m c² ①", "x₁ \\cdot y"])
def test_raised_and_lowered_figures_beside_latex_are_read(text: str) -> None:
    assert not any(character.isdigit() and not character.isdecimal() for character in SPOKEN(text))
