"""Which cells the import rules refuse, and what they say."""

import ast

import pytest

from sbx.guest.import_rules import ImportRules, Violation, check

STRICT = ImportRules(
    allow=frozenset({"math", "numpy", "os", "importlib", "matplotlib.pyplot"}),
    forbid=frozenset({"os.system", "os.symlink", "numpy.ctypeslib"}),
)


def _refused(code: str, rules: ImportRules = STRICT, **more: object) -> str | None:
    violation = check(ast.parse(code), rules, **more)  # type: ignore[arg-type]
    return violation.name if violation else None


@pytest.mark.parametrize(
    "code",
    [
        "import math",
        "import numpy.linalg as la",
        "from numpy import array, linalg",
        "import matplotlib.pyplot as plt",
        "from matplotlib import pyplot",
        "from . import mine",
        "import os; os.getcwd()",
        "class A: pass\na = A(); a.system('ls')",
        "x.system('ls')",
        "open('f').read()",
    ],
)
def test_let_pass(code: str) -> None:
    assert _refused(code) is None


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("import socket", "socket"),
        ("import math, socket", "socket"),
        ("import http.client as h", "http.client"),
        ("from urllib.request import urlopen", "urllib.request"),
        ("def f():\n    import subprocess", "subprocess"),
        ("__import__('socket')", "socket"),
        ("import importlib\nimportlib.import_module('socket.x')", "socket.x"),
        ("from importlib import import_module as im\nim(name='socket')", "socket"),
        ("import builtins as b\nb.__import__('socket')", "builtins"),
        ("import matplotlib", "matplotlib"),
        ("import os\nos.system('ls')", "os.system"),
        ("import os as o\no.system", "os.system"),
        ("from os import system", "os.system"),
        ("from os import symlink as s", "os.symlink"),
        ("from os import *", "os.*"),
        ("import os\ngetattr(os, 'system')", "os.system"),
        ("import numpy.ctypeslib", "numpy.ctypeslib"),
        ("from numpy import ctypeslib", "numpy.ctypeslib"),
        ("import numpy as np\nnp.ctypeslib.load_library", "numpy.ctypeslib"),
    ],
)
def test_refused(code: str, name: str) -> None:
    refused = _refused(code)
    assert refused is not None
    assert refused == name or refused.startswith(f"{name}.")


def test_forbid_beats_allow_and_covers_what_lies_below() -> None:
    rules = ImportRules(allow=frozenset({"os"}), forbid=frozenset({"os"}))
    assert _refused("import os.path", rules) == "os.path"


def test_without_an_allow_list_everything_else_passes() -> None:
    rules = ImportRules(forbid=frozenset({"socket"}))
    assert _refused("import anything.at_all", rules) is None
    assert _refused("from socket import create_connection", rules) == "socket"


def test_modules_of_earlier_cells_are_known() -> None:
    assert _refused("o.system('ls')", modules={"o": "os"}) == "os.system"


def test_the_users_own_modules_need_no_allowance_but_are_no_way_round_forbid() -> None:
    rules = ImportRules(allow=frozenset(), forbid=frozenset({"socket"}))
    assert _refused("import mine.part", rules, is_local=lambda name: name == "mine") is None
    assert _refused("import socket", rules, is_local=lambda name: True) == "socket"


def test_the_sentence_names_line_module_and_what_is_allowed() -> None:
    violation = check(ast.parse("\nimport socket"), STRICT)
    assert violation == Violation("socket", None, 2)
    assert "line 2" in violation.sentence(STRICT)
    assert "'socket'" in violation.sentence(STRICT)
    assert "matplotlib.pyplot, numpy" in violation.sentence(STRICT)


def test_rules_come_from_the_boot_frame() -> None:
    rules = ImportRules.from_json({"allow": None, "forbid": ["os.system"]})
    assert rules == ImportRules(None, frozenset({"os.system"}))
