"""Events and runs as JSON: any encoder can write what is told, and it is read back equal."""

import contextlib
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbx.protocol.events import (
    event_from_json,
    run_from_json,
    run_to_json,
    to_json,
    value_from_json,
    value_to_json,
)
from sbx.protocol.runs import (
    Cause,
    Clear,
    Display,
    Error,
    Event,
    InputRequest,
    Result,
    Run,
    RunEnd,
    RunError,
    RunStart,
    Status,
    Stderr,
    Stdout,
)

texts = st.text(st.characters(exclude_categories=())) | st.text("\ud83d\ude00\ufdd0d89ab0 é")
keys = texts | st.sampled_from(["$float", "$$float", "$int", "$$$int", "$", ""])
huge = st.integers(12_990, 20_000).map(lambda bits: -(1 << bits))  # which repr() would refuse
numbers = st.integers() | st.floats() | huge
values = st.recursive(
    st.none() | st.booleans() | numbers | texts | st.sampled_from(["nan", "inf", "0x1f"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)
bundles = st.dictionaries(keys, values, max_size=3)
counts = st.none() | st.integers(0)
errors = st.builds(RunError, texts, texts, texts)
runs = st.builds(
    Run,
    run_id=texts,
    status=st.sampled_from(Status),
    cause=st.none() | st.sampled_from(Cause),
    stdout=texts,
    stderr=texts,
    text=texts,
    result=st.none() | texts,
    outputs=st.lists(bundles, max_size=2).map(tuple),
    error=st.none() | errors,
    exit_code=st.none() | st.integers(0, 255),
    execution_count=counts,
    duration_s=st.floats(0),
    state_lost=st.booleans(),
    truncated=st.booleans(),
)
events = st.one_of(
    st.builds(RunStart, texts),
    st.builds(Stdout, texts),
    st.builds(Stderr, texts),
    st.builds(Display, bundles, bundles, st.none() | texts, st.booleans()),
    st.builds(Clear, st.booleans()),
    st.builds(Result, bundles, bundles, counts),
    st.builds(Error, errors),
    st.builds(InputRequest, texts, st.booleans()),
    st.builds(RunEnd, runs),
)


def sent(form: Any) -> Any:
    """Over a wire that takes strict JSON in strict UTF-8 only."""
    written = json.dumps(form, allow_nan=False, ensure_ascii=False).encode("utf-8", "strict")
    return json.loads(written)


def _comparable(value: Any) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # which no limit keeps from being written
    if isinstance(value, dict):
        return [(key, _comparable(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_comparable(item) for item in value]
    return value


def same(one: Any, other: Any) -> bool:
    """Equal, and nan is nan; 1 is not True, nor 1.0."""
    return repr(_comparable(one)) == repr(_comparable(other))


@given(values)
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    assert same(value_from_json(sent(value_to_json(value))), value)


@given(events)
def test_an_event_comes_back_as_it_was(event: Event) -> None:
    form = to_json(event)
    back = event_from_json(sent(form))
    assert type(back) is type(event)
    assert to_json(back) == form


@given(runs)
def test_a_run_comes_back_as_it_was(run: Run) -> None:
    form = run_to_json(run)
    back = run_from_json(sent(form))
    assert run_to_json(back) == form
    assert (back.stdout, back.status, back.cause) == (run.stdout, run.status, run.cause)
    assert (back.error, back.result) == (run.error, run.result)


@given(values)
def test_whatever_is_received_is_an_event_or_a_value_error(answer: Any) -> None:
    for kind in ("stdout", "display", "run_end", "clear"):
        form = {**answer, "type": kind} if isinstance(answer, dict) else answer
        with contextlib.suppress(ValueError):
            assert event_from_json(form).type == kind


def test_what_needs_no_care_stands_as_it_is() -> None:
    bundle = {"text/plain": "é😀", "application/json": {"a": [1, 2.5, None, True]}}
    run = Run("run-1", Status.OK, stdout="é😀\n", outputs=(bundle,))
    assert run_to_json(run)["outputs"] == [bundle]
    assert run_to_json(run)["stdout"] == "é😀\n"
    assert to_json(Stdout("a")) == {"type": "stdout", "text": "a"}


def test_the_three_things_that_json_has_not() -> None:
    assert value_to_json([math.inf, "a\ud800", 16**4000])[:2] == [
        {"$float": "inf"},
        "a\ufdd0d800",
    ]
    assert value_to_json({"$float": "nan"}) == {"$$float": "nan"}


@pytest.mark.parametrize("never", [b"bytes", {1: "a"}, {"a": {1}}, object()])
def test_what_json_has_no_place_for_is_refused(never: Any) -> None:
    with pytest.raises(TypeError):
        value_to_json(never)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        [],
        {},
        {"type": "other"},
        {"type": ["stdout"]},
        {"type": "stdout"},
        {"type": "stdout", "text": 3},
        {"type": "run_end", "run": {"run_id": "a", "status": "fine"}},
    ],
)
def test_what_is_no_event_is_a_value_error(answer: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        event_from_json(answer)
