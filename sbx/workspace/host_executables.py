"""The table of host executables: names of files that make a program of the host execute a command.

A process that can write such a file chooses the command. In a host directory (`--workspace`,
projects, notebooks), neither code inside nor a call of the API on the host may write below an
existing name of this table. A new name goes to the quarantine (`sbx.workspace.quarantine`).
`sbx.guest.path_rules` has the scopes and the matching.

The matching recognizes two kinds by their content instead of their name: a directory that is itself
a git repository (HEAD next to objects and refs), and a Python environment (`pyvenv.cfg`).

A name belongs to the table if a program obeys the file although the user did not ask it to run the
project. The user looks at the directory (git status), opens it in an editor, starts an interpreter,
installs a package, or converts a notebook. Editors also start linters and formatters by themselves.
Therefore the table has the settings of these tools if the file is code or names code.

These names are not in the table:

    .editorconfig              no editor executes a program that it names
    *.pth outside site-packages  Python reads them in site directories only; elsewhere the ending
                               belongs to saved models
    .gitattributes             it names only drivers that the repository's configuration defines. It
                               is protected if that configuration defines one (`aliases`)
    Makefile, package.json, conftest.py, build.rs, Vagrantfile, …
                               the project's own code: a user who runs it decides to run code
                               that the sandbox wrote
    pyproject.toml, setup.cfg, tox.ini, package.json
                               the same linters read their settings there, too, and some settings
                               name code: [tool.pylint.main] init-hook, flake8 local-plugins. But a
                               project needs these files to work. A user whose editor lints the
                               directory by itself runs the project's code
    .prettierrc, .stylelintrc  data in most projects; `prettier` in package.json has the same effect
    .bundle                    a Gemfile is Ruby code, which each bundle command executes anyway
    .nvmrc, .node-version, .ruby-version
                               a version of an installed program
    .psqlrc, .my.cnf, .terraformrc, .condarc
                               read in the home only
    .env                       data for the project's code
    modules in subdirectories  a `types.py` in a package is ordinary. In the directory itself it
                               would break Python for the project, so it counts only there

Inside `node_modules`, `site-packages` and similar trees, the settings of editors, package managers
and hooks do not count: each program reads them in its working directory or above. Git is the
exception, because it also reads the settings of a package when a user looks into the package.
"""

from typing import NamedTuple

from sbx.guest.path_rules import NameRule, PathRules

PACKAGE_TREES = ("node_modules", "site-packages", "dist-packages", "bower_components")


# The names of nbconvert's templates. nbconvert looks for them in the current directory first.
_NBCONVERT_TEMPLATES = (
    "asciidoc", "base", "basic", "classic", "compatibility", "lab", "latex", "markdown", "python",
    "reveal", "rst", "script", "webpdf",
)  # fmt: skip
# Modules that Python 3.8 to 3.13 look for in the current directory, measured with `python3 -vv`, by
# `python3` (interactive), `python3 -m` pip, venv, json.tool, http.server and ipykernel_launcher.
_MODULES = (
    "__future__", "_bisect", "_bz2", "_colorize", "_compression", "_curses", "_datetime", "_heapq",
    "_json", "_lzma", "_opcode", "_opcode_metadata", "_posixsubprocess", "_pyrepl", "_random",
    "_sha2", "_sha512", "_socket", "_ssl", "_struct", "_typing", "_weakrefset", "_winapi", "_wmi",
    "argparse", "array", "ast", "base64", "binascii", "bisect", "bz2", "calendar", "code", "codeop",
    "collections", "contextlib", "copy", "copyreg", "dataclasses", "datetime", "dis", "email",
    "enum", "fcntl", "fnmatch", "functools", "gettext", "grp", "heapq", "html", "http", "importlib",
    "inspect", "ipaddress", "json", "keyword", "linecache", "locale", "logging", "lzma", "math",
    "mimetypes", "msvcrt", "nt", "ntpath", "opcode", "operator", "org", "pathlib", "pkgutil",
    "platform", "quopri", "random", "re", "reprlib", "runpy", "select", "selectors", "shlex",
    "shutil", "signal", "socket", "socketserver", "sre_compile", "sre_constants", "sre_parse",
    "ssl", "string", "struct", "subprocess", "sysconfig", "termios", "textwrap", "threading",
    "token", "tokenize", "traceback", "types", "typing", "unicodedata", "urllib", "uu", "venv",
    "warnings", "weakref", "winreg", "zlib",
)  # fmt: skip
# Modules that ipython imports at an error, or to complete a name.
_IPYTHON_MODULES = (
    "_typeshed", "astroid", "asttokens", "colorama", "ctags", "executing", "jedi", "numpydoc",
    "parso", "pure_eval", "stack_data", "typing_extensions",
)  # fmt: skip


class HostExecutable(NamedTuple):
    """Names that one program obeys. `names` are patterns for one path component, in lower case.
    See `NameRule` for `parents` and `is_module`."""

    names: tuple[str, ...]
    program: str
    reference: str
    scope: str = "tree"
    parents: tuple[str, ...] = ()
    is_module: bool = False


TABLE = (
    HostExecutable((".git",), "git", "git-config(1) core.fsmonitor; githooks(5)", "any"),
    HostExecutable((".gitmodules",), "git", "gitmodules(5)"),
    HostExecutable((".gitconfig",), "git", "git-config(1), include.path of a repository"),
    HostExecutable((".githooks",), "git", "git-config(1) core.hooksPath, by convention"),
    HostExecutable((".hg",), "mercurial", "hgrc(5) [hooks]", "any"),
    HostExecutable((".husky",), "husky", "hooks of git, named by core.hooksPath"),
    HostExecutable(
        (".pre-commit-config.yaml", ".pre-commit-config.yml"), "pre-commit", "repos.hooks.entry"
    ),
    HostExecutable((".lefthook*", "lefthook.y*ml", "lefthook.toml", "lefthook.json"), "lefthook",
                   "commands and scripts of hooks"),
    HostExecutable((".envrc*", ".direnv"), "direnv", "direnv(1)"),
    HostExecutable((".autoenv*",), "autoenv", "executed by cd"),
    HostExecutable((".tool-versions",), "asdf", "asdf plugins, ref:"),
    HostExecutable(
        (".mise.toml", "mise.toml", ".mise", ".mise.*.toml", "mise.*.toml", ".rtx.toml"),
        "mise", "hooks, env._.source, tasks",
    ),
    HostExecutable((".vscode", "*.code-workspace"), "VS Code", "tasks.json runOn folderOpen"),
    HostExecutable((".devcontainer", ".devcontainer.json"), "dev containers", "initializeCommand"),
    HostExecutable((".idea", ".fleet", ".zed"), "JetBrains, Zed", "run configurations, tasks"),
    HostExecutable(
        (
            ".claude", ".cursor", ".codex", ".gemini", ".windsurf", ".roo", ".continue", ".kiro",
            "opencode.json", ".aider*", ".mcp.json",
        ),
        "coding agents", "hooks, commands and MCP servers of a project",
    ),
    HostExecutable((".npmrc",), "npm", "npmrc(5) node-options, script-shell, git"),
    HostExecutable((".yarnrc*", ".yarn", ".pnp.*", ".pnpmfile.*"), "yarn, pnpm", "yarnPath, hooks"),
    HostExecutable((".cargo",), "cargo", "config.toml build.rustc-wrapper, target.runner"),
    HostExecutable((".pypirc", "pip.conf", ".netrc", "uv.toml"), "pip, twine, uv",
                   "index, credentials"),
    HostExecutable(
        (
            ".bashrc", ".bash_profile", ".bash_login", ".bash_logout", ".bash_aliases", ".profile",
            ".zshrc", ".zshenv", ".zprofile", ".zlogin", ".zlogout", ".kshrc", ".cshrc", ".tcshrc",
            ".login", ".inputrc", ".xprofile", ".xinitrc", ".xsession",
        ),
        "shells", "bash(1) INVOCATION, zsh(1) ZDOTDIR", "root",
    ),
    HostExecutable((".ssh", ".gnupg"), "ssh, gpg", "ssh_config(5) ProxyCommand", "root"),
    HostExecutable(
        (".config",), "systemd, desktops, mise", "systemd.unit(5), autostart, mise.toml"
    ),
    HostExecutable((".local",), "desktops, shells", "bin on PATH, applications", "root"),
    HostExecutable(
        (".vim", ".emacs*", ".tmux.conf", ".forward", ".bash_completion", ".sqliterc"),
        "programs that read a home", "for a user who works with HOME set to the directory", "root",
    ),
    HostExecutable((".vimrc", "_vimrc", ".exrc", ".gvimrc", ".nvimrc", ".nvim.lua"), "vim",
                   "'exrc' option"),
    HostExecutable((".dir-locals.el", ".dir-locals-2.el"), "emacs", "eval of local variables"),
    HostExecutable((".gdbinit", ".lldbinit"), "gdb, lldb", "auto-load of the current directory"),
    HostExecutable((".pdbrc", ".pythonrc*"), "pdb", "commands at the start of the debugger"),
    HostExecutable(
        (
            ".irbrc", ".pryrc", ".rprofile", ".rdata", ".ghci", ".ocamlinit", ".iex.exs",
            ".octaverc", ".ycm_extra_conf.py", ".lvimrc", ".rvmrc",
        ),
        "interpreters and editors", "read in the current directory",
    ),
    HostExecutable((".helix", ".bsp"), "helix, build servers", "language servers of a project"),
    HostExecutable((".jj", ".sl", "_darcs"), "version control", "configuration of a repository"),
    HostExecutable(
        ("readline.py", "rlcompleter.py", "pip.py", "ipykernel_launcher.py", "storemagic.py"),
        "python", "imported by python, ipython, python -m pip, a Jupyter kernel", is_module=True,
    ),
    HostExecutable(
        tuple(f"{module}.py" for module in (*_MODULES, *_IPYTHON_MODULES)),
        "python", "imported by an interactive interpreter, python -m pip and the like", "root",
        is_module=True,
    ),
    HostExecutable(
        ("nt", "msvcrt", "winreg", "_winapi", "_wmi", "_sysconfigdata_*"),
        "python", "modules of other systems: a directory suffices, `from nt import x`", "root",
    ),
    HostExecutable(
        ("python", "python.*"), "python", "copy, pickle: org.python.core of Jython", "root",
        parents=("org",),
    ),
    HostExecutable(
        (
            "index.*.j2", "base.*.j2", "script.j2", "style_*.tex.j2", "report.tex.j2",
            "document_contents.tex.j2", "display_priority.j2", "null.j2", "celltags.j2",
            "cell_id_anchor.j2", "cellslidedata.j2", "jupyter_widgets.html.j2", "mathjax.html.j2",
            "mermaidjs.html.j2", "display_priority.tpl", "full.tpl",
        ),
        "nbconvert", "TemplateExporter.extra_template_basedirs", parents=_NBCONVERT_TEMPLATES,
    ),
    # nbconvert makes one exporter with the template "", whose directory is the current one.
    HostExecutable(("conf.json",), "nbconvert", "type and arguments of preprocessors"),
    HostExecutable(
        ("jupyter_*config.py", "jupyter_*config.json", "ipython_config.py"),
        "jupyter", "configuration in the current directory",
    ),
    HostExecutable((".venv", "venv"), "python", "interpreter that editors choose by its name"),
    HostExecutable(
        ("sitecustomize.py", "usercustomize.py"), "python", "module site", is_module=True
    ),
    HostExecutable((".python-version", ".python-versions"), "uv", "a path of an interpreter"),
    HostExecutable(
        (".pylintrc", "pylintrc", ".pylintrc.toml", "pylintrc.toml"), "pylint",
        "init-hook, load-plugins",
    ),
    HostExecutable((".flake8",), "flake8", "local-plugins"),
    HostExecutable((".mypy.ini", "mypy.ini"), "mypy", "plugins, python_executable"),
    HostExecutable(
        (".eslintrc", ".eslintrc.*", "eslint.config.*"), "ESLint", "code; parser and plugins"
    ),
    HostExecutable(
        (
            ".prettierrc.*js", ".prettierrc.*ts", "prettier.config.*", ".stylelintrc.*js",
            "stylelint.config.*",
        ),
        "prettier, stylelint", "settings that are code",
    ),
    HostExecutable(
        (".rubocop", ".rubocop.yml", ".solargraph.yml"), "rubocop, solargraph", "require, plugins"
    ),
    HostExecutable((".latexmkrc", "latexmkrc"), "latexmk", "latexmk(1): Perl code"),
    HostExecutable((".renviron",), "R", "Startup: R_PROFILE_USER, R_LIBS_USER"),
    HostExecutable(("rust-toolchain", "rust-toolchain.toml"), "rustup", "path of a toolchain"),
    HostExecutable(("ansible.cfg",), "ansible", "plugin paths, vault_password_file, inventory"),
    HostExecutable((".mvn",), "maven", "jvm.config: -javaagent; extensions.xml"),
    HostExecutable(("bunfig.toml",), "bun", "preload"),
    HostExecutable((".bazelrc", ".bazeliskrc", ".bazelversion"), "bazel",
                   "startup --host_jvm_args, BAZELISK_BASE_URL"),
    HostExecutable(("hie.yaml",), "haskell-language-server", "cradle: bios: shell"),
    HostExecutable(("*.pth",), "python", "module site", "packages"),
    HostExecutable(("*.desktop",), "desktops", "Exec= of a desktop entry"),
)  # fmt: skip


def path_rules(
    *,
    add: tuple[str, ...] = (),
    remove: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
    import_roots: tuple[str, ...] = (),
) -> PathRules:
    """Return the table as rules. `add` and `remove` are patterns from the operator's settings."""
    removed = {pattern.casefold() for pattern in remove}
    rules = [
        NameRule(
            name,
            entry.program,
            entry.scope,  # type: ignore[arg-type]  # a literal of TABLE
            entry.parents,
            entry.is_module,
        )
        for entry in TABLE
        for name in entry.names
        if name not in removed
    ]
    rules += [NameRule(name.casefold(), "the operator's setting", "any") for name in add]
    return PathRules(rules, PACKAGE_TREES, aliases, import_roots)
