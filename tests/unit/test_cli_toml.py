"""What the writer writes, tomllib reads."""

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from sbx.settings_files import to_toml

# A lone surrogate is in no TOML file; a policy has whole numbers up to 64 bits and finite others.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
numbers = st.integers(-(1 << 63), (1 << 63) - 1)
value = text | numbers | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)
values = value | st.lists(value, max_size=12)
tables = st.dictionaries(text, values, max_size=4)
policies = st.dictionaries(text, values | tables | st.lists(tables, min_size=1, max_size=3))


@given(policies)
def test_a_table_survives_writing_and_reading(policy: dict[str, object]) -> None:
    assert tomllib.loads(to_toml(policy)) == policy


def test_what_is_none_is_left_out() -> None:
    assert to_toml({"interpreter": None, "user": "sandbox"}) == 'user = "sandbox"\n'
