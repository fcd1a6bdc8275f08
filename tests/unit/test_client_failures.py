"""Every error that sbx raises comes back from a service as what it was: its class and its code."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sbx import errors
from sbx.api.errors import error_response, status_of
from sbx.client.errors import error_of

PACKAGE = Path(__file__).resolve().parents[2] / "sbx"
HERE_ONLY = {"cli", "client", "guest"}  # what is raised there never travels
CLASSES: dict[str, type[errors.SbxError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.SbxError)
}


def raised() -> Iterator[tuple[str, str]]:
    """(class, code) of every error that is made somewhere in the package."""
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in HERE_ONLY:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = node.func.id if isinstance(node.func, ast.Name) else name
            if name not in CLASSES:
                continue
            codes = [word.value for word in node.keywords if word.arg == "code"]
            if not codes:
                yield name, CLASSES[name].code
            elif isinstance(codes[0], ast.Constant):
                yield name, str(codes[0].value)


BAYS = ("BadRequest", "capability_not_supported")  # of its browser routes, which we never call


def test_every_error_comes_back_as_its_class_with_its_code() -> None:
    """In one test: to read the whole package for their names would cost each process's start."""
    found = sorted({pair for pair in raised() if pair[0] != "SbxError"} - {BAYS})
    assert len(found) > 50
    for name, code in found:
        comes_back(name, code)


def comes_back(name: str, code: str) -> None:
    details = {"limit": 5, "retry_after_s": 1.5}
    error = CLASSES[name]("why", code=code, hint="do", details=details)
    response = error_response(error, "request-1")
    found = error_of(response.status_code, bytes(response.body))
    assert (type(found).__name__, found.code) == (name, code)
    assert (found.message, found.hint) == ("why", "do")
    assert found.details == {**details, "request_id": "request-1"}
    assert response.status_code == status_of(error)


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[]", b'{"error": 5}', b'{"error": {}}', b'{"error": {"code": 5}}']
)
def test_a_body_that_is_none_of_ours(body: bytes) -> None:
    found = error_of(502, body)
    assert (type(found), found.code) == (errors.Broken, "foreign_reply")
