"""The table of names that a program of the host obeys: whoever writes the file chooses a command.

In a directory of the host (`--workspace`, projects, notebooks) no code inside and no call of the
host's API may write below an existing name of this table, and a new one goes to the quarantine
(`sbx.workspace.quarantine`). `sbx.guest.path_rules` has the scopes and the matching.

Two kinds need the content, not the name, and are part of the matching: a directory that *is* a git
repository (HEAD next to objects and refs) and a Python environment (`pyvenv.cfg`).

Left out, for a reason:

    .editorconfig              no editor executes a program that it names
    *.pth outside site-packages  Python reads them in site directories only; elsewhere the ending
                               belongs to saved models
    .gitattributes             names only drivers that the repository's configuration defines; it is
                               protected where that configuration defines one (`aliases`)
    Makefile, package.json, conftest.py, build.rs, …
                               the project's own code: to run it is to run what the sandbox wrote

Inside `node_modules`, `site-packages` and similar trees the settings of editors, package managers
and hooks do not count: each program reads them in the directory in which it is started, or above.
Git is the exception, since it also works for a user who looks into a package.
"""

from typing import NamedTuple

from sbx.guest.path_rules import NameRule, PathRules

PACKAGE_TREES = ("node_modules", "site-packages", "dist-packages", "bower_components")


class HostExecutable(NamedTuple):
    """Names that one program obeys. `names` are patterns of one path component, in lower case."""

    names: tuple[str, ...]
    program: str
    reference: str
    scope: str = "tree"


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
    HostExecutable((".pypirc", "pip.conf", ".netrc"), "pip, twine", "index, credentials"),
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
        ("readline.py", "rlcompleter.py", "pip.py"),
        "python", "imported by an interactive interpreter and by python -m pip",
    ),
    HostExecutable(
        ("jupyter_*config.py", "jupyter_*config.json", "ipython_config.py"),
        "jupyter", "configuration in the current directory",
    ),
    HostExecutable((".venv", "venv"), "python", "interpreter that editors choose by its name"),
    HostExecutable(("sitecustomize.py", "usercustomize.py"), "python", "module site"),
    HostExecutable(("*.pth",), "python", "module site", "packages"),
    HostExecutable(("*.desktop",), "desktops", "Exec= of a desktop entry"),
)  # fmt: skip


def path_rules(
    *,
    add: tuple[str, ...] = (),
    remove: tuple[str, ...] = (),
    aliases: tuple[str, ...] = (),
) -> PathRules:
    """The table as rules. `add` and `remove` are patterns from the operator's settings."""
    removed = {pattern.casefold() for pattern in remove}
    rules = [
        NameRule(name, entry.program, entry.scope)  # type: ignore[arg-type]  # a literal of TABLE
        for entry in TABLE
        for name in entry.names
        if name not in removed
    ]
    rules += [NameRule(name.casefold(), "the operator's setting", "any") for name in add]
    return PathRules(rules, PACKAGE_TREES, aliases)
