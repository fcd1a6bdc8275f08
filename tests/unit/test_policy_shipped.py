"""The shipped policies: complete, explained, and as strong as they say."""

import ast
import tomllib

import pytest

from sbx.guest import import_rules
from sbx.policy import Policy, available, check, load, shipped_directory
from sbx.policy.problems import all_keys

SHIPPED = sorted(shipped_directory().glob("*.toml"))


def test_the_five_are_there_and_without_problems() -> None:
    assert {path.stem for path in SHIPPED} >= {
        *("default", "strict", "data-science", "networked", "notebook")
    }
    assert [problem for path in SHIPPED for problem in check(path)] == []


def test_default_is_what_a_policy_that_says_nothing_comes_to() -> None:
    words = {"description": "", "expect": ()}
    assert load("default").model_copy(update=words) == Policy(name="default")


PARTS = ("filesystem.mount", "network.rule", "secrets", "grant")


def test_default_writes_out_every_key_there_is() -> None:
    """The file is the documentation of the format: a key that is added there is explained there."""
    text = (shipped_directory() / "default.toml").read_text()
    table = tomllib.loads(text)
    for key in all_keys(Policy):
        top, _, name = key.rpartition(".")
        if key in ("name", "interpreter") or top in PARTS:
            assert name in text  # in a comment, since it has no default
        elif top == "expect":
            assert all(name in example for example in table["expect"])
        else:
            assert name in (table[top] if top else table), key


@pytest.mark.parametrize("info", available(), ids=lambda info: info.name)
def test_each_has_a_description_and_examples_of_both_kinds(info: object) -> None:
    policy = load(getattr(info, "name"))  # noqa: B009
    assert policy.description
    verdicts = [example.then for example in policy.expect]
    assert 4 <= len(verdicts) <= 10
    assert {"allowed", "denied"} <= set(verdicts)
    assert all(ast.parse(example.run) for example in policy.expect)


def test_guest_refuses_exactly_the_examples_that_say_refused() -> None:
    for policy in (load(path.stem) for path in SHIPPED):
        allow, forbid = policy.imports.allow, frozenset(policy.imports.forbid)
        rules = import_rules.ImportRules(None if allow == "any" else frozenset(allow), forbid)
        for example in policy.expect:
            violation = import_rules.check(ast.parse(example.run), rules)
            assert (violation is not None) == (example.then == "refused"), example.run


def test_strict_has_no_processes_and_only_hard_walls() -> None:
    strict = load("strict")
    assert (strict.processes, strict.filter, "shell" in strict.capabilities) == (
        False,
        "strict",
        False,
    )
    assert set(strict.walls.model_dump().values()) == {"hard"}
    assert "but the disk limit" in strict.description  # it is not one of these walls


def test_default_runs_without_cgroups_but_not_without_the_inner_walls() -> None:
    walls = load("default").walls
    assert (walls.namespaces, walls.seccomp, walls.landlock) == ("hard", "hard", "hard")
    assert (walls.memory, walls.tasks, walls.cpu) == ("best-effort",) * 3


def test_none_reaches_a_host_and_one_has_a_proxy_to_be_told_of_some() -> None:
    networks = {path.stem: load(path.stem).network for path in SHIPPED}
    assert [name for name, network in networks.items() if network.mode != "none"] == ["networked"]
    assert not any(network.allow or network.allow_private for network in networks.values())


def test_data_science_preloads_and_has_more_room_than_default() -> None:
    science, default = load("data-science"), load("default")
    assert {"numpy", "pandas", "matplotlib"} <= set(science.preload)
    assert science.limits.memory_max > default.limits.memory_max
    assert science.limits.run_timeout > default.limits.run_timeout


def test_only_notebook_has_the_notebook_s_directory_and_else_is_data_science() -> None:
    assert [path.stem for path in SHIPPED if load(path.stem).workspace != "own"] == ["notebook"]
    science, notebook = load("data-science"), load("notebook")
    own = {"name", "description", "expect", "workspace", "limits"}
    assert notebook.model_dump(exclude=own) == science.model_dump(exclude=own)
    assert notebook.limits.memory_max == science.limits.memory_max
