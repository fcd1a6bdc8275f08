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

No table is complete. Therefore a new name that begins with a dot goes to the quarantine as well,
unless it is in `DATA` or lies below one of `BUILD_DIRECTORIES`. So does a new name that begins with
`-` or `+`: `tar cf x.tar *` and `vim *` take it for an option. The table remains for names without
a dot, for existing files, which are read-only, and for the name of the program.

These names are free:

    DATA                       its comments have the reasons
    .gitattributes             it names only drivers that the repository's configuration defines. It
                               is protected if that configuration defines one (`aliases`)
    *.pth outside site-packages  Python reads them in site directories only; elsewhere the ending
                               belongs to saved models
    Makefile, package.json, conftest.py, build.rs, Vagrantfile, node_modules, …
                               the project's own code: a user who runs it decides to run code
                               that the sandbox wrote. An editor with a language server, a linter or
                               a test runner of the project runs it when it opens the directory
                               (`node_modules/typescript/lib/tsserver.js`)
    pyproject.toml, setup.cfg, tox.ini, package.json
                               the same linters read their settings there, too, and some settings
                               name code: [tool.pylint.main] init-hook, flake8 local-plugins, or an
                               index: [tool.uv]. But a project needs these files to work. A user
                               whose editor lints the directory by itself runs the project's code
    an existing file with a dot that the table does not have
                               `.prettierrc`, `.babelrc`, `.bundle`: the project's settings
    modules in subdirectories  a `types.py` in a package is ordinary. In the directory itself it
                               would break Python for the project, so it counts only there

`.env` is in the table, because editors start interpreters with it (PYTHONPATH), and shells source
it on cd. An example (`.env.example`) is data.

Inside `node_modules`, `site-packages` and similar trees, the settings of editors, package managers
and hooks do not count: each program reads them in its working directory or above. Git is the
exception, because it also reads the settings of a package when a user looks into the package.
"""

from typing import NamedTuple

from sbx.guest.path_rules import NameRule, PathRules

PACKAGE_TREES = ("node_modules", "site-packages", "dist-packages", "bower_components")
# Names with a dot or `+` that are free although they are new, and why no program of the host runs
# them.
DATA = (
    # lists of paths and of people for git and others
    ".*ignore", ".gitattributes", ".gitkeep", ".keep", ".mailmap", ".git-blame-ignore-revs",
    ".editorconfig", ".env.example", ".env.sample", ".env.template", ".env.dist",
    # another machine obeys them; `.github/hooks` and the like are in the table
    ".github", ".gitlab", ".gitlab-ci.yml", ".circleci", ".travis.yml", ".readthedocs.y*ml",
    ".nojekyll", ".well-known", ".streamlit",  # settings of a server, without code
    # caches and results of tests: only the program that wrote them reads them, as data
    ".*cache", ".coverage", ".coverage.*", ".nyc_output", ".hypothesis", ".benchmarks",
    ".testmondata", ".ipynb_checkpoints", ".virtual_documents",
    # results of a build, for the same build: see BUILD_DIRECTORIES
    ".next", ".nuxt", ".output", ".svelte-kit", ".astro", ".angular", ".docusaurus", ".vite",
    ".turbo", ".parcel-cache", ".pnpm-store", ".eggs", ".deps", ".libs", ".doctrees", ".buildinfo",
    ".tsbuildinfo", ".ninja_log", ".ninja_deps",
    # temporary files of editors, desktops, network file systems and programs that write atomically
    ".*.sw?", ".*.un~", ".#*", ".~*", "._*", ".tmp*", ".temp*", ".*.tmp", ".*.temp", ".*.part",
    ".*.partial", ".*.crdownload", ".*.lock", ".lock", ".goutputstream-*", ".nfs[0-9]*",
    ".fuse_hidden*", ".ds_store",
    # routes of SvelteKit: no command of vim or less has such a name
    "+page.svelte", "+page.[jt]s", "+page.server.[jt]s", "+page.md", "+page.svx", "+error.svelte",
    "+layout.svelte", "+layout.[jt]s", "+layout.server.[jt]s", "+server.[jt]s",
)  # fmt: skip
# No program looks into them for settings; only the project's own commands run their content.
BUILD_DIRECTORIES = (
    "build", "build[-_.]*", "cmake-build-*", "_build", "dist", "dist[-_.]*", "target",
    "__pycache__", "htmlcov", ".*cache", ".next", ".nuxt", ".output", ".svelte-kit", ".astro",
    ".angular", ".docusaurus", ".vite", ".turbo", ".pnpm-store", ".eggs", ".deps", ".libs",
    ".doctrees", ".hypothesis", ".ipynb_checkpoints", ".nyc_output",
)  # fmt: skip


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
            "opencode.json*", ".opencode", "crush.json", ".crush*", ".aider*", ".mcp.json", ".qwen",
            ".factory", ".amp", ".kilocode*", ".pi", ".cline*", ".junie", ".trae", ".augment*",
        ),
        "coding agents", "hooks, commands and MCP servers of a project",
    ),
    HostExecutable(("hooks", "agents", "copilot"), "Copilot", "hooks and MCP servers of a project",
                   parents=(".github",)),
    HostExecutable((".env",), "VS Code, zsh", "python.envFile: PYTHONPATH; the plugin dotenv"),
    HostExecutable((".npmrc",), "npm", "npmrc(5) node-options, script-shell, git"),
    HostExecutable((".yarnrc*", ".yarn", ".pnp.*", ".pnpmfile.*", "pnpm-workspace.yaml",
                    ".corepack.env"), "yarn, pnpm, corepack",
                   "yarnPath, hooks, pnpmfile, the source of yarn"),
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
        (".emacs*", ".tmux.conf", ".forward", ".bash_completion", ".sqliterc"),
        "programs that read a home", "for a user who works with HOME set to the directory", "root",
    ),
    HostExecutable((".vimrc", "_vimrc", ".exrc", ".gvimrc", ".nvimrc", ".nvim.lua", ".vim"), "vim",
                   "'exrc' option; coc-settings.json"),
    HostExecutable((".dir-locals.el", ".dir-locals-2.el"), "emacs", "eval of local variables"),
    HostExecutable((".gdbinit", ".lldbinit"), "gdb, lldb", "auto-load of the current directory"),
    HostExecutable((".pdbrc", ".pythonrc*"), "pdb", "commands at the start of the debugger"),
    HostExecutable(
        (
            ".irbrc", ".pryrc", ".rprofile", ".rdata", ".ghci", ".ocamlinit",
            ".octaverc", ".ycm_extra_conf.py", ".lvimrc", ".rvmrc",
        ),
        "interpreters and editors", "read in the current directory",
    ),
    HostExecutable(
        (
            ".helix", ".bsp", ".lsp", ".luarc.*", ".merlin", ".factorypath",
            ".externaltoolbuilders", ".clangd", ".clang-tidy", ".terraform",
        ),
        "helix, language servers", "servers, plugins and processors of a project",
    ),
    HostExecutable(
        (
            ".graphqlrc*", "graphql.config.*", "tailwind.config.*", "svelte.config.*",
            ".markdownlint-cli2.*", ".markdownlint.*js", ".oxlintrc*", "oxlint.config.*",
        ),
        "language servers and linters", "settings that are code, or that name code",
    ),
    HostExecutable((".golangci.*", ".lintr", ".php-cs-fixer*", ".*.exs"), "linters",
                   "plugins; R, PHP and Elixir code"),
    HostExecutable((".sqlfluff", ".ansible-lint*", ".pyre_configuration*"), "linters",
                   "library_path, rulesdir, binary"),
    HostExecutable((".jj", ".sl", "_darcs", ".svn", ".bzr", ".pijul", ".repo", ".west"),
                   "version control", "configuration of a repository"),
    HostExecutable(("root", "checkin.prog", "update.prog"), "cvs", "CVS_RSH of :ext;",
                   parents=("cvs",)),
    HostExecutable((".ctags*", "ctags.d", "gtags.conf", ".globalrc"), "ctags, gtags",
                   "-f overwrites any file; a parser is a library"),
    HostExecutable((".lazygit.y*ml",), "lazygit", "custom commands"),
    HostExecutable(("config.toml", "config.*.toml"), "mise", "as mise.toml",
                   parents=("mise",)),
    HostExecutable(("config.properties",), "gradle", "java.home", parents=(".gradle",)),
    HostExecutable(("activate.r",), "R", "sourced by .Rprofile", parents=("renv",)),
    HostExecutable(("startup.m",), "MATLAB", "read in the current directory"),
    HostExecutable(("global.json",), "dotnet", "paths of an SDK"),
    HostExecutable(("ldaprc",), "curl and others with LDAP", "ldap.conf(5): servers, TLS_REQCERT"),
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
        (
            "jupyter*config.py", "jupyter*config.json", "ipython_*config.py", "nbgrader_config.*",
            "ipc*_config.py", "ipengine_config.py", ".jupytext*", "jupytext.py",
            "jupytext.toml", "jupytext.y*ml", "jupytext.json",
        ),
        "jupyter", "configuration in the current directory",
    ),
    HostExecutable((".venv", "venv"), "python", "interpreter that editors choose by its name"),
    HostExecutable(
        ("sitecustomize.py", "usercustomize.py"), "python", "module site", is_module=True
    ),
    HostExecutable(
        (".python-version*", ".*-version", ".nvmrc", ".ruby-*", ".versions.conf", ".pdm-python"),
        "uv, pdm, version managers", "a path of an interpreter, also by `..` in a version",
    ),
    HostExecutable((".poetry",), "poetry", "plugins is a site directory"),
    HostExecutable(
        (".pylintrc", "pylintrc", ".pylintrc.toml", "pylintrc.toml"), "pylint",
        "init-hook, load-plugins",
    ),
    HostExecutable((".flake8",), "flake8", "local-plugins"),
    HostExecutable((".mypy.ini", "mypy.ini", ".dmypy.json"), "mypy",
                   "plugins, python_executable; the process that dmypy kill ends"),
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
        (".rubocop*", ".solargraph.yml"), "rubocop, solargraph", "require, plugins"
    ),
    HostExecutable((".latexmkrc", "latexmkrc"), "latexmk", "latexmk(1): Perl code"),
    HostExecutable((".renviron",), "R", "Startup: R_PROFILE_USER, R_LIBS_USER"),
    HostExecutable(("rust-toolchain", "rust-toolchain.toml"), "rustup", "path of a toolchain"),
    HostExecutable(("ansible.cfg",), "ansible", "plugin paths, vault_password_file, inventory"),
    HostExecutable((".mvn",), "maven", "jvm.config: -javaagent; extensions.xml"),
    HostExecutable(("bunfig.toml",), "bun", "preload"),
    HostExecutable((".bazelrc", ".bazeliskrc", ".bazelversion"), "bazel",
                   "startup --host_jvm_args, BAZELISK_BASE_URL"),
    HostExecutable(("bazel",), "bazelisk", "tools/bazel", parents=("tools",)),
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
    """Return the table as rules. `add` and `remove` are patterns from the operator's settings.

    A removed name is free, also if it is new: `.*` frees all names that begin with a dot.
    """
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
    data = (*DATA, *sorted(removed))
    return PathRules(rules, PACKAGE_TREES, aliases, import_roots, data, BUILD_DIRECTORIES)
