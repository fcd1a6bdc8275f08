"""What may be asked of an environment: packages, and nothing that steers the installer."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sbx.environments.requirements import (
    KERNEL,
    LockFile,
    agreed,
    lock_text,
    locked,
    parse_file,
    parse_words,
    refuse_sources,
)
from sbx.errors import BadRequest
from sbx.policy import Policy, load

_SHA = "sha256:" + "ab" * 32
_OTHER = "sha256:" + "cd" * 32


def test_without_building_a_url_is_one_of_a_wheel() -> None:
    refuse_sources(parse_words(["numpy", "x @ https://host/x-1-py3-none-any.whl?a=b#sha256=c"]))
    for url in ("https://host/x-1.tar.gz", "file:///x", "https://host/?x.whl", "http://h/x#.whl"):
        with pytest.raises(BadRequest) as raised:
            refuse_sources(parse_words([f"x @ {url}"]))
        assert raised.value.code == "invalid_requirement"


def test_words_become_canonical_requirements() -> None:
    found = parse_words(["NumPy", "pandas >= 2 , < 3", "httpx[http2]==0.28.1"])
    assert [one.text for one in found] == ["NumPy", "pandas<3,>=2", "httpx[http2]==0.28.1"]
    assert [one.name for one in found] == ["numpy", "pandas", "httpx"]


@pytest.mark.parametrize(
    "word",
    [
        "--index-url=https://evil.example/simple",
        "-rrequirements.txt",
        "-e.",
        "--target=/etc",
        "numpy --index-url https://evil.example/simple",
        "numpy\n--index-url https://evil.example/simple",
        "numpy --hash=sha256:" + "0" * 64,
        "x @ https://host/x.whl --extra-index-url https://evil.example",
        "x @ git+https://host/x.git",
        "x @ https://user:secret@host/x.whl",
        "x @ https://host/${HOME}/x.whl",
        "./here",
        "/etc/passwd",
        "",
        " ",
        "numpy;import os",
        "num py",
        "\x1b[2Jnumpy",
        "a" * 5000,
    ],
)
def test_what_is_no_name_of_a_package_is_refused(word: str) -> None:
    with pytest.raises(BadRequest) as raised:
        parse_words([word])
    assert raised.value.code == "invalid_requirement"
    assert raised.value.message.isprintable()


def test_a_file_has_comments_continued_lines_and_hashes() -> None:
    text = (
        f"# ours\n\nnumpy==2.0  # fast\npandas==2.2 \\\n    --hash={_SHA} \\\n    --hash={_OTHER}\n"
    )
    numpy, pandas = parse_file(text, "requirements.txt")
    assert (numpy.text, numpy.hashes) == ("numpy==2.0", ())
    assert (pandas.text, pandas.hashes) == ("pandas==2.2", (_SHA, _OTHER))


@pytest.mark.parametrize(
    "line",
    [
        "--index-url https://evil.example/simple",
        "-i https://evil.example/simple",
        "--find-links /tmp",
        "-r other.txt",
        "-c constraints.txt",
        "-e git+https://host/x.git#egg=x",
        "numpy --config-settings=--build-option=x",
        "numpy --global-option x",
        "--trusted-host evil.example",
    ],
)
def test_an_option_in_a_file_is_refused_with_its_line(line: str) -> None:
    with pytest.raises(BadRequest, match=r"list\.txt:2") as raised:
        parse_file(f"six\n{line}\n", "list.txt")
    assert raised.value.code == "invalid_requirement"


def test_a_lock_says_the_same_after_it_was_written() -> None:
    packages = [
        LockFile("six", "six==1.17.0", (_SHA, _OTHER)),
        LockFile("tiny", "tiny @ file:///w/tiny-1.0-py3-none-any.whl", (_SHA,)),
    ]
    assert locked(lock_text(packages)) == packages


@pytest.mark.parametrize("text", ["six==1.0\n", f"six --hash={_SHA}\n", "--index-url x\n"])
def test_a_lock_without_versions_or_hashes_is_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"six|index"):
        locked(text)


def test_hashes_that_were_asked_for_are_those_of_the_lock() -> None:
    lock = [LockFile("six", "six==1.17.0", (_SHA, _OTHER))]
    assert agreed(lock, parse_file(f"six --hash={_OTHER}", "f"))[0].hashes == (_OTHER,)
    with pytest.raises(BadRequest) as raised:
        agreed(lock, parse_file("six --hash=sha256:" + "ee" * 32, "f"))
    assert raised.value.code == "hash_mismatch"


def test_what_the_kernel_needs_is_what_sbx_itself_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    needs = map(Requirement, project["project"]["dependencies"])
    assert KERNEL in [str(one) for one in needs if one.name == "ipykernel"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "-x", ".hidden", "a" * 65, "a b", "é", "a\n"])
def test_a_policy_s_environment_is_a_plain_name(name: str) -> None:
    with pytest.raises(ValueError, match=r"environment|too long|valid"):
        Policy(name="p", interpreter=f"env:{name}")


def test_a_policy_says_which_environment_it_names() -> None:
    assert Policy(name="p", interpreter="env:science-2.0").environment == "science-2.0"
    assert Policy(name="p", interpreter="/usr/bin/python3").environment is None
    assert load("default").environment is None
