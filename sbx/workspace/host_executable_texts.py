"""Read host executables that name further files: git settings, hooks, `.envrc`.

Each reader turns a text into aliases. An unreadable file has none.
"""

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from sbx.workspace.executed_words import (
    Mention,
    envrc_mentions,
    hook_configuration_mentions,
    script_mentions,
)
from sbx.workspace.git_settings import (
    FileSettings,
    Repository,
    expanded,
    homes,
    includes,
    settings_of_repository,
    settings_of_user,
)
from sbx.workspace.host_executable_aliases import ALIASES_MAX, Aliases
from sbx.workspace.small_files import read_small

HOOK_CONFIGURATIONS = (
    *(".pre-commit-config.yaml", ".pre-commit-config.yml"),
    *(f"{dot}lefthook{local}.{kind}" for dot in ("", ".") for local in ("", "-local")
      for kind in ("yml", "yaml", "toml", "json")),
)  # fmt: skip
HOOK_DIRECTORIES = (".husky", ".githooks")
_SCRIPT_MAX = 64 << 10
_SCRIPTS_MAX = 200
_DEPTH_MAX = 3
_WORDS = re.compile(r"[^\s\"'!;&|()=]+")
_HOOKS = (
    "applypatch-msg", "pre-applypatch", "post-applypatch", "pre-commit", "pre-merge-commit",
    "prepare-commit-msg", "commit-msg", "post-commit", "pre-rebase", "post-checkout",
    "post-merge", "pre-push", "pre-receive", "update", "proc-receive", "post-receive",
    "post-update", "reference-transaction", "push-to-checkout", "pre-auto-gc", "post-rewrite",
    "sendemail-validate", "fsmonitor-watchman", "post-index-change",
)  # fmt: skip


class HostExecutableTexts:
    """The readers for the directory `top`, which belongs to the uid `owner`.

    The results are `aliases` and `drivers`, which is True if a git configuration defines a driver.
    """

    def __init__(self, top: str, owner: int) -> None:
        self.aliases = Aliases(top, homes(owner)[0])
        self.drivers = False
        self._top = top
        self._user = settings_of_user(owner)
        self._scripts: set[tuple[str, str]] = set()

    @property
    def is_cut_off(self) -> bool:
        return len(self._scripts) >= _SCRIPTS_MAX or len(self.aliases.paths) >= ALIASES_MAX

    def read(self, path: str) -> None:
        """Read the host executable at this path, if it is of a kind that names files."""
        directory, name = os.path.split(path)
        with suppress(OSError, ValueError):
            if name == ".git":
                self._read_repository(Repository.at(directory))
            elif name.startswith(".envrc"):
                self._read_envrc(path, directory, 0)
            elif name in HOOK_DIRECTORIES:
                for hooks in (path, os.path.join(path, "_")):  # husky generates the files in `_`
                    self._read_hooks(hooks, (directory, self._top))
            elif name in HOOK_CONFIGURATIONS:
                self._take(hook_configuration_mentions(read_small(path)), [directory], directory, 0)

    def read_user_settings(self) -> None:
        """Apply the settings of the user to the directory itself, even if it is not a repository:
        the user may create one later."""
        for file in self._user:
            self.aliases.protect(file.path)  # `~/.gitconfig` may be a link into the directory
        self._apply_user_settings(self._top)

    def _read_repository(self, repository: Repository) -> None:
        files = settings_of_repository(repository, self.aliases.home)
        others = [
            os.path.join(repository.git, setting.value)
            for file in files
            for setting in file.settings
            if setting.key == "core.worktree" and setting.value
        ]
        for tree in (repository.work_tree, *others):
            self._apply(files, tree)
            self._apply_user_settings(tree)
            self._read_hooks(os.path.join(repository.common, "hooks"), (tree,))

    def _apply(self, files: Sequence[FileSettings], tree: str) -> None:
        """Protect each file of the tree that a value of the repository's configuration names."""
        for file in files:
            for path in includes(file.settings):
                self.aliases.protect_always(os.path.dirname(file.path), path)
            for key, value in file.settings:
                self.drivers = self.drivers or _is_driver(key)
                if key == "core.hookspath" and value:
                    self._read_hooks_path(tree, value, file.home)
                elif value and not key.startswith("include"):
                    for word in _WORDS.findall(value):
                        self.aliases.protect_named(tree, word)

    def _apply_user_settings(self, tree: str) -> None:
        """Protect each file of the tree that the settings of the user name.

        These settings apply to every directory. Therefore a name without a slash
        (`defaultBranch = main`) counts only if it is a file.
        """
        for file in self._user:
            for key, value in file.settings:
                # git-lfs defines its filter for all repositories of the user.
                if _is_driver(key) and not key.startswith("filter.lfs."):
                    self.drivers = True
                if key == "core.hookspath" and value:
                    self._read_hooks_path(tree, value, file.home)
                elif value and not key.startswith("include"):
                    for word in _WORDS.findall(value):
                        if "/" in word or os.path.isfile(os.path.join(tree, word)):
                            self.aliases.protect_named(tree, word)

    def _read_hooks_path(self, tree: str, value: str, home: str) -> None:
        path = os.path.join(tree, expanded(value, home))
        if self.aliases.is_above(tree, path):
            for name in _HOOKS:
                self.aliases.protect(os.path.join(path, name))
        else:
            self.aliases.protect(path)
        self._read_hooks(path, (tree,))

    def _read_hooks(self, directory: str, bases: Sequence[str]) -> None:
        """Protect the files that hooks execute. Git runs hooks in the top of the work tree."""
        try:
            names = sorted(os.listdir(directory))
        except OSError:
            return
        if self.aliases.is_above(bases[0], directory):
            names = [name for name in names if name in _HOOKS]
        for name in names:
            path = os.path.join(directory, name)
            if not name.endswith(".sample"):
                if os.path.islink(path):
                    self.aliases.protect(path)
                self._read_script(path, bases, 0)

    def _read_script(self, path: str, bases: Sequence[str], depth: int) -> None:
        """Read a hook, or a shell script that a hook executes, `depth` steps from the hook."""
        if self._is_new(path, bases[0], depth):
            with suppress(OSError, ValueError):
                text = read_small(path, _SCRIPT_MAX)
                is_script = text.startswith("#!") or path.endswith((".sh", ".bash"))
                if (depth == 0 or is_script) and "\0" not in text:
                    mentions, changes = script_mentions(text)
                    bases = [*bases, *(os.path.join(bases[0], change) for change in changes)]
                    self._take(mentions, bases, os.path.dirname(path), depth)

    def _read_envrc(self, path: str, base: str, depth: int) -> None:
        """Read `.envrc`, or a file that it sources from the directory `base`. direnv(1) asks the
        user to allow `.envrc` only."""
        if self._is_new(path, base, depth):
            with suppress(OSError, ValueError):
                mentions, sourced = envrc_mentions(read_small(path))
                self._take(mentions, [base], os.path.dirname(path), depth)
                for word in sourced:
                    file = os.path.join(base, expanded(word, self.aliases.home))
                    file = os.path.join(file, ".envrc") if os.path.isdir(file) else file
                    for directory in dict.fromkeys((base, os.path.dirname(file))):
                        self._read_envrc(file, directory, depth + 1)

    def _take(
        self, mentions: Iterable[Mention], bases: Sequence[str], directory: str, depth: int
    ) -> None:
        for path in self.aliases.take(bases, mentions, directory):
            self._read_script(path, bases, depth + 1)

    def _is_new(self, path: str, base: str, depth: int) -> bool:
        """Return whether to read the script, and record that it is read."""
        if depth > _DEPTH_MAX or self.is_cut_off or (path, base) in self._scripts:
            return False
        self._scripts.add((path, base))
        return True


def _is_driver(key: str) -> bool:
    return key.startswith(("filter.", "diff.", "merge.")) and key.count(".") > 1
