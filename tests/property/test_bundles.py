"""Bundles whose JSON stays encoded: counted without decoding, read as if it had been decoded."""

import copy
import json
import pickle
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sbx.guest import frames as guest
from sbx.kernels import frames
from sbx.protocol.bundles import Bundle, BundlePart, count_values, outline, text_of, weight
from sbx.protocol.events import encode, event_from_json, run_from_json, run_to_json, to_json
from sbx.protocol.runs import Display, Run, Status

texts = st.text(st.characters(codec="utf-8")) | st.text('"\\[]{},: \n\ufdd0é$')
keys = texts | st.sampled_from(["$float", "$$float", "$int", "$", "$schema", ""])
numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
huge = st.integers(12_990, 14_000).map(lambda bits: 1 << bits)
values = st.recursive(
    st.none() | st.booleans() | numbers | huge | texts | st.sampled_from(["nan", "0x1f"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
indents = st.sampled_from([None, 0, 1])


def count(value: Any) -> int:
    """Values and keys, by a walk."""
    match value:
        case dict():
            return 1 + len(value) + sum(map(count, value.values()))
        case list():
            return 1 + sum(map(count, value))
    return 1


def kept(value: Any, *, ascii: bool = True, indent: int | None = None) -> dict[str, Any]:
    raw = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    return frames.kept({"application/json": msgspec.Raw(raw)})


@given(values, st.booleans(), indents)
@example([[], {}, [""], {"": ""}, "[]", '\\"', ["\\"]], False, 0)
def test_values_are_counted_as_a_walk_counts_them(value: Any, ascii: bool, indent: Any) -> None:
    encoded = json.dumps(value, ensure_ascii=ascii, indent=indent).encode()
    assert count_values(encoded) == count(value)
    if indent is None:
        assert guest.values_in(encoded.replace(b", ", b",")) == guest.values_in(encoded)
        assert guest.values_in(encoded) == count(value)


@given(texts)
def test_an_outline_has_nothing_of_a_string(text: str) -> None:
    assert outline(json.dumps([text, {text: 1}]).encode()) == b'[", {": 1}]'


@given(values, st.booleans(), indents)
def test_a_part_is_read_as_its_value(value: Any, ascii: bool, indent: Any) -> None:
    assert kept(value, ascii=ascii, indent=indent)["application/json"] == value


@given(values, st.booleans(), indents)
@example({"$float": "nan"}, True, None)
@example([{"$float": "nan"}, "\ufdd0"], False, None)
@example({"\ufdd0": 1 << 13_500}, True, None)
def test_the_copied_form_of_a_part_is_that_of_its_value(
    value: Any, ascii: bool, indent: Any
) -> None:
    shown = Display(kept(value, ascii=ascii, indent=indent), kept({"a": value}))
    run = Run("run-1", Status.OK, text="é\u2028", outputs=(shown.data,))
    copied, copied_run = (
        encode(to_json(shown, encoded=True)),
        encode(run_to_json(run, encoded=True)),
    )
    walked, walked_run = encode(to_json(shown)), encode(run_to_json(run))
    for content in (copied, copied_run):
        assert content.isascii()
        assert b"\n" not in content
        assert b"\r" not in content
    assert json.loads(copied) == json.loads(walked)
    assert json.loads(copied_run) == json.loads(walked_run)
    assert event_from_json(json.loads(copied)) == shown
    assert run_from_json(json.loads(copied_run)) == run


@given(st.dictionaries(keys, values, max_size=4))
def test_a_bundle_is_used_as_a_dict(bundle: dict[str, Any]) -> None:
    def fresh() -> Bundle:
        return Bundle({name: BundlePart(json.dumps(one).encode()) for name, one in bundle.items()})

    assert fresh() == bundle
    assert bundle == fresh()
    assert fresh() == fresh()
    assert fresh() != {**bundle, "more": 1}
    assert dict(fresh()) == {**fresh()} == fresh().copy() == fresh() | {} == {} | fresh() == bundle
    assert list(fresh().items()) == list(bundle.items())
    assert list(fresh().values()) == list(bundle.values())
    assert list(fresh()) == list(bundle)
    assert json.dumps(fresh()) == json.dumps(bundle)
    assert repr(fresh()) == repr(bundle)
    assert pickle.loads(pickle.dumps(fresh())) == copy.deepcopy(fresh()) == copy.copy(fresh())
    for name, one in bundle.items():
        assert fresh()[name] == fresh().get(name) == fresh().pop(name) == one
        assert fresh().setdefault(name) == one
        assert text_of(fresh(), name) is None
    assert fresh().get("no such", 7) == fresh().pop("no such", 7) == 7
    if bundle:
        assert fresh().popitem() == list(bundle.items())[-1]


def test_a_part_is_decoded_once_and_keeps_what_the_caller_changes() -> None:
    bundle = kept([1])
    bundle["application/json"].append(2)
    assert bundle == {"application/json": [1, 2]}


@pytest.mark.parametrize(
    "text", [b'["\xff"]', b"[1e999]", b"[%s]" % (b"9" * 5000), b"[1", b"[nan]", b'["\\ud800"]', b""]
)
def test_a_part_that_no_client_could_read_is_refused_at_once(text: bytes) -> None:
    with pytest.raises(frames.MalformedFrame):
        frames.kept({"a/b": msgspec.Raw(text)})


def test_only_values_that_have_another_form_weigh() -> None:
    """The rest of a part is copied, however long it is."""
    assert weight([kept([0] * 100_000)]) == 2
    assert weight([kept(["$schema", {"$ref": "1e5"}] * 10_000)]) == 2
    assert weight([kept([{"$float": 1}] * 10)]) == 2 + 31
