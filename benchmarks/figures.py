"""The result of a measurement."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    name: str
    value: float
    unit: str


def per_second(name: str, value: float) -> Figure:
    return Figure(name=name, value=round(value), unit="/s")


def milliseconds(name: str, seconds: float) -> Figure:
    return Figure(name=name, value=round(seconds * 1000, 2), unit="ms")


def ratio(name: str, value: float) -> Figure:
    return Figure(name=name, value=round(value, 2), unit="x")


def statements(name: str, number: int) -> Figure:
    return Figure(name=name, value=number, unit="statements")


def count(name: str, number: float) -> Figure:
    return Figure(name=name, value=round(number, 1), unit="")
