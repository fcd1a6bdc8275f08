"""Which paths of a host directory are free, protected, or new in the quarantine: by tables."""

import pytest

from sbx.guest.path_rules import PathRules
from sbx.workspace.host_executables import TABLE, path_rules

RULES = path_rules(aliases=("config/envrc", "tools/hooks"))


def match(path: str, *there: str, rules: PathRules = RULES) -> str:
    """free, protected or new, in a directory that holds these paths and what lies above them."""
    existing = {tuple(one.split("/")[:depth]) for one in there for depth in range(1, 9)}
    found = rules.match(path.split("/"), lambda parts: parts in existing)
    return "free" if found is None else "new" if found.is_new else "protected"


@pytest.mark.parametrize(
    ("path", "there", "expected"),
    [
        ("main.py", (), "free"),
        (".envrc", (), "new"),
        (".envrc", (".envrc",), "protected"),
        (".ENVRC", (), "new"),
        # names that a file system of the host may take for one of the table
        (".g\u200cit", (), "new"),
        (".envr\u00adc", (".envr\u00adc",), "protected"),
        ("a/.v\ufeffscode\ufe0f/tasks.json", ("a/.v\ufeffscode\ufe0f",), "protected"),
        (".git.", (), "new"),
        (".envrc . ", (), "new"),
        ("config/ENVRC", ("config/ENVRC",), "protected"),  # an alias
        ("GIT~1", (), "free"),
        ("GIT~1", ("GIT~1",), "free"),
        ("GIT~1", ("GIT~1", "git~1"), "protected"),
        ("a/gi7d29~1/config", ("a/gi7d29~1", "a/GI7D29~1"), "protected"),
        ("notes.~1~", ("notes.~1~", "NOTES.~1~"), "free"),
        ("...", (), "new"),
        ("a/b/.vscode", ("a/b",), "new"),
        ("a/.vscode/tasks.json", ("a/.vscode",), "protected"),
        (".bashrc", (), "new"),
        ("a/.bashrc", ("a/.bashrc",), "free"),  # a shell reads it in a home only
        ("envrc", (), "free"),
        (".envrc.private", (), "new"),
        # new names that begin with a dot or a hyphen
        (".unknown", (), "new"),
        ("a/.unknown", ("a",), "new"),
        (".unknown", (".unknown",), "free"),
        (".unknown/a", (".unknown",), "free"),
        (".GITIGNORE", (), "free"),
        (".env", (".env",), "protected"),
        (".env.example", (), "free"),
        (".env.local", (), "new"),
        (".github/workflows/ci.yml", (".github/workflows",), "free"),
        (".github/hooks", (".github",), "new"),
        (".github/hooks/a.json", (".github/hooks",), "protected"),
        (".x.swp", (), "free"),
        ("build/.x", ("build",), "free"),
        ("dist-2/a/-x", ("dist-2/a",), "free"),
        ("builder/.x", ("builder",), "new"),
        ("node_modules/.x", ("node_modules",), "free"),
        (".mypy_cache/.x", (".mypy_cache",), "free"),
        ("-x", (), "new"),
        ("a/--checkpoint=1", ("a",), "new"),
        ("-x", ("-x",), "free"),
        ("a-x", (), "free"),
        # names in a directory
        ("tools/bazel", ("tools",), "new"),
        ("cvs/Root", ("cvs/Root",), "protected"),
        ("root", (), "free"),
        # trees of packages
        ("node_modules/x/.npmrc", ("node_modules/x",), "free"),
        ("node_modules/x/.git", ("node_modules/x",), "new"),
        ("lib/site-packages/x.pth", ("lib/site-packages",), "new"),
        ("lib/site-packages/x/y.pth", ("lib/site-packages/x",), "free"),
        ("model.pth", (), "free"),
        # a repository of the user
        (".git/config", (".git/HEAD", ".git/config"), "protected"),
        (".git/config.lock", (".git/HEAD",), "protected"),
        (".git/hooks/pre-commit", (".git/hooks",), "protected"),
        (".git/commondir", (".git/HEAD",), "protected"),
        (".git/rebase-merge", (".git/HEAD",), "protected"),
        (".git/info/attributes", (".git/info",), "protected"),
        (".git/objects/info/alternates", (".git/objects/info",), "protected"),
        (".git/modules/x/config", (".git/modules/x",), "protected"),
        (".git/index.lock", (".git/HEAD",), "protected"),  # git trusts the paths of an index
        (".git/refs/heads/x.lock", (".git/refs/heads",), "protected"),
        # a directory that is a repository by its content
        ("x/HEAD", ("x/objects", "x/refs"), "new"),
        ("x/objects", ("x/HEAD", "x/refs"), "new"),
        ("x/refs", ("x/HEAD", "x/objects"), "new"),
        ("x/commondir", ("x/HEAD",), "new"),
        ("x/HEAD", ("x",), "new"),  # always, so that no race completes a repository
        ("HEAD", (), "new"),
        ("x/head", ("x",), "free"),
        ("x/HEAD", ("x/HEAD",), "protected"),
        ("x/HEAD/a", ("x/HEAD",), "free"),  # a directory is no head
        ("x/refs", ("x",), "free"),
        ("x/refs", ("x/HEAD",), "new"),
        ("x/a", ("x/HEAD",), "free"),
        ("x/config", ("x/HEAD", "x/objects", "x/refs"), "protected"),
        ("x/index", ("x/HEAD", "x/objects", "x/refs"), "protected"),
        ("x", ("x/HEAD", "x/objects", "x/refs"), "protected"),  # to move it
        ("py", ("py/pyvenv.cfg",), "protected"),
        ("HEAD", ("objects", "refs"), "new"),
        # environments
        ("py/pyvenv.cfg", ("py",), "new"),
        ("py/lib/a.py", ("py/pyvenv.cfg", "py/lib"), "protected"),
        # modules of Python
        ("keyword.py", (), "new"),
        ("keyword.py", ("keyword.py",), "protected"),
        ("keyword.pyc", (), "new"),
        ("keyword.so", (), "new"),
        ("keyword.cpython-311-x86_64-linux-gnu.so", (), "new"),
        ("keyword.pyi", (), "free"),
        ("keyword", (), "free"),  # without __init__ Python prefers its own
        ("keyword/__init__.py", ("keyword",), "new"),
        ("keyword/__init__.abi3.so", ("keyword",), "new"),
        ("keyword/main.py", ("keyword",), "free"),
        ("a/keyword.py", ("a",), "free"),  # an ordinary module of a package
        ("a/keyword/__init__.py", ("a/keyword",), "free"),
        ("__init__.py", (), "free"),
        ("a/pip/__init__.py", ("a/pip",), "new"),
        ("a/ipykernel_launcher.py", ("a",), "new"),
        ("lib/site-packages/pip/__init__.py", ("lib/site-packages/pip",), "free"),
        ("nt/x.py", ("nt",), "protected"),
        ("org/python/core.py", ("org/python",), "protected"),
        ("org/python", ("org",), "new"),
        ("org/notes.org", ("org",), "free"),
        ("a/org/python/x.py", ("a/org/python",), "free"),
        # templates of nbconvert
        ("lab/index.html.j2", ("lab",), "new"),
        ("a/markdown/index.md.j2", ("a/markdown",), "new"),
        ("lab/notes.j2", ("lab",), "free"),
        ("templates/index.html.j2", ("templates",), "free"),
        ("index.html.j2", (), "free"),
        ("conf.json", (), "new"),
        ("a/conf.json", ("a",), "new"),
        ("py/conda-meta", ("py",), "new"),
        ("py/bin/python", ("py/conda-meta", "py/bin"), "protected"),
        # what an existing entry leads to
        ("config/envrc", (), "protected"),
        ("tools/hooks/pre-commit", ("tools/hooks",), "protected"),
        ("tools/hooks2", ("tools",), "free"),
    ],
)
def test_path_is_free_protected_or_new(path: str, there: tuple[str, ...], expected: str) -> None:
    assert match(path, *there) == expected


@pytest.mark.parametrize(
    ("path", "is_parent"),
    [
        ("pip", True),
        ("a/pip", True),
        ("LAB", True),
        ("a/b/lab", True),
        ("keyword", True),
        ("a/keyword", False),
        ("org", True),
        ("a/org", False),
        ("node_modules/lab", False),
        ("src", False),
    ],
)
def test_directory_whose_name_gives_names_below_it_a_meaning(path: str, is_parent: bool) -> None:
    assert RULES.is_parent(path.split("/")) == is_parent


def test_operator_adds_and_removes_names() -> None:
    rules = path_rules(add=("*.Secret",), remove=(".npmrc", "email.py"))
    assert match("a/x.SECRET", "a", rules=rules) == "new"
    assert match(".npmrc", rules=rules) == "free"  # also by the rule for new names
    assert match(".unknown", rules=rules) == "new"
    assert match(".unknown", rules=path_rules(remove=(".*",))) == "free"
    assert match("email/__init__.py", "email", rules=rules) == "free"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("ftplib.py", "new"),
        ("ftplib.pyc", "new"),
        ("ftplib.cpython-311-x86_64-linux-gnu.so", "new"),
        ("yaml/__init__.py", "new"),
        ("scripts/json.py", "new"),
        ("main.py", "free"),
        ("ftplib.txt", "free"),
        ("html/index.html", "free"),
        ("src/ftplib.py", "free"),
    ],
)
def test_modules_of_the_standard_library_are_protected_where_they_are_imported(
    path: str, expected: str
) -> None:
    rules = path_rules(import_roots=("", "scripts"))
    assert match(path, rules=rules) == expected
    assert match(path) == "free"


def test_rules_cross_the_wall_as_plain_data() -> None:
    again = PathRules.from_json(RULES.to_json())
    assert again.to_json() == RULES.to_json()
    assert match(".envrc", rules=again) == "new"


def test_names_of_the_table_are_single_components_in_lower_case() -> None:
    for entry in TABLE:
        assert entry.program
        assert entry.reference
        for name in entry.names:
            assert name == name.casefold()
            assert "/" not in name


@pytest.mark.parametrize(
    ("path", "above"), [("config", True), ("tools", True), ("config/envrc", False), ("src", False)]
)
def test_a_directory_above_an_alias_may_not_be_moved(path: str, above: bool) -> None:
    assert RULES.is_above_alias(path.split("/")) == above
