"""Import rules: what a cell's text gives away, before it runs."""

import ast

import pytest

from sbx.guest import import_rules
from sbx.policy.imports import permits, refusals
from sbx.policy.tables import Imports

RULES = Imports(
    allow=("asyncio", "json", "numpy", "os", "urllib.parse"),
    forbid=("os.system", "socket", "numpy.f2py"),
)


@pytest.mark.parametrize(
    "code",
    [
        "import json, numpy.linalg as la",
        "from urllib import parse",
        "import os\nos.path.join('a', 'b')",
        "from os.path import join",
        "import asyncio\nawait asyncio.sleep(0)",
        "from . import sibling",
        "signal = [1]\nsignal.append(2)",
        "'import socket'",
    ],
)
def test_cell_within_the_rules_is_not_refused(code: str) -> None:
    assert refusals(code, RULES) == []


@pytest.mark.parametrize(
    ("code", "name", "forbidden"),
    [
        ("import socket", "socket", True),
        ("import json\nif True:\n  from socket import create_connection", "socket", True),
        ("import requests.sessions", "requests", False),
        ("from urllib import request", "urllib.request", False),
        ("import os\nos.system('id')", "os.system", True),
        ("import os as o\nrun = o.system", "os.system", True),
        ("from os import system", "os.system", True),
        ("from os import *", "os.system", True),
        ("os.system('id')", "os.system", True),
        ("import numpy as np\nnp.f2py.compile('')", "numpy.f2py", True),
        ("from numpy import f2py", "numpy.f2py", True),
        ("__import__('socket')", "socket", True),
        ("import importlib", "importlib", False),
        ("importlib.import_module('socket', None)", "socket", True),
    ],
)
def test_cell_outside_the_rules_is_refused_by_name(code: str, name: str, forbidden: bool) -> None:
    (refusal,) = refusals(code, RULES)
    assert (refusal.name, refusal.forbidden) == (name, forbidden)
    assert name in str(refusal)


@pytest.mark.parametrize(
    "code",
    [
        "import json, numpy.linalg as la",
        "import os as o\nrun = o.system",
        "from os import *",
        "from os.path import join",
        "from urllib import request",
        "__import__('socket')",
        "signal = [1]\nsignal.append(2)",
    ],
)
def test_policy_and_guest_give_one_answer(code: str) -> None:
    assert not isinstance(RULES.allow, str)
    guests = import_rules.ImportRules(frozenset(RULES.allow), frozenset(RULES.forbid))
    violation = import_rules.check(ast.parse(code), guests)
    assert (violation is not None) == bool(refusals(code, RULES))


def test_every_refusal_is_told_with_its_line() -> None:
    found = refusals("import json\nimport socket\nimport requests", RULES)
    assert [(one.name, one.line) for one in found] == [("socket", 2), ("requests", 3)]


def test_without_rules_not_even_the_syntax_is_looked_at() -> None:
    assert refusals("!ls", Imports()) == []


@pytest.mark.parametrize("code", ["!ls", "1 +", "\0", "(" * 5000, "-" * 200_000 + "1"])
def test_what_is_not_python_is_a_syntax_error(code: str) -> None:
    with pytest.raises(SyntaxError):
        refusals(code, RULES)


def test_forbid_alone_permits_all_else() -> None:
    rules = Imports(forbid=("socket",))
    assert permits(rules, "sockets")
    assert not permits(rules, "socket.socket")
