"""The patterns that pydantic 2.12 writes for a Decimal, without their look-aheads, which grammars do not have."""

from __future__ import annotations

import re

__all__ = ["plain_decimal"]

HEAD = r"^(?!^[-+.]*$)[+-]?0*"
ANY = r"\d*\.?\d*$"
PLACES = re.compile(r"\\d\*\\\.\?\\d\{0,(\d{1,3})\}0\*\$")
DIGITS = re.compile(r"\(\?:\\d\{0,(\d{1,2})\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\*\\\.\\d\*0\*\$\)")
DIGITS_AND_PLACES = re.compile(
    r"\(\?:\\d\{0,(\d{1,3})\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)\\d\{0,\1\}\\\.\\d\{0,(\d{1,3})\}0\*\$\)"
)


def plain_decimal(pattern: str) -> str:
    """Return the pattern of a decimal number, with pydantic's `max_digits` and `decimal_places`, as one without
    look-ahead. Other patterns are returned unchanged. Each text of the new pattern is one of the old."""
    rest = pattern.removeprefix(HEAD)
    if rest == pattern:
        return pattern
    if rest == ANY:
        return _signed(r"\d+\.?\d*", r"\.\d+")
    if places := PLACES.fullmatch(rest):
        return _signed(rf"\d+(\.{_digits(0, int(places[1]))}0*)?", *_fraction("", int(places[1])))
    if both := DIGITS_AND_PLACES.fullmatch(rest):
        whole, behind = int(both[1]), int(both[2])
        before = f"0*{_digits(1, whole)}" if whole else "0+"
        return _signed(rf"{before}(\.{_digits(0, behind)}0*)?", *_fraction("0*", behind))
    if digits := DIGITS.fullmatch(rest):
        most = int(digits[1])
        parted = (rf"0*{_digits(whole, whole)}\.{_digits(1, most - whole)}0*" for whole in range(most))
        return _signed(rf"0*{_digits(1, most)}(\.0*)?" if most else r"0+(\.0*)?", *parted)
    return pattern


def _signed(*alternatives: str) -> str:
    return f"^[+-]?({'|'.join(alternatives)})$"


def _digits(least: int, most: int) -> str:
    return rf"\d{{{least},{most}}}"


def _fraction(before: str, places: int) -> list[str]:
    return [rf"{before}\.{_digits(1, places)}0*"] if places else []
