"""Reads the Dockerfiles that need no container engine.

A task whose image is a plain system plus its own files can run in a sandbox without images: COPY,
WORKDIR and ENV are data, and a RUN that only arranges files can run inside. `parse` turns those into
steps and names every instruction that means more than that.
"""

import json
import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from titogym.envs.sandboxes.base import SYSTEM_PATH, Sandbox, SandboxError
from titogym.errors import UserError

# Images that hold a plain system; what they have beyond it is at most a Python.
PLAIN_BASES = frozenset({"debian", "ubuntu", "python", "scratch"})
# Programs of coreutils and the like, whose effect on files is the same in any system.
# fmt: off
PLAIN_PROGRAMS = frozenset({
    "[", ":", "cat", "cd", "chmod", "cp", "echo", "false", "head", "ln", "mkdir", "mv", "printf", "python3",
    "rm", "rmdir", "sed", "seq", "set", "sort", "tail", "tar", "tee", "test", "touch", "tr", "true",
    "truncate",
})
# fmt: on
# Top-level directories that belong to the system.
READ_ONLY = frozenset({"usr", "bin", "sbin", "lib", "lib64", "dev", "proc", "sys"})
_IGNORED = frozenset({"CMD", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL"})
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_OPERATORS = frozenset({"&&", "||", ";", "|"})


@dataclass(frozen=True, slots=True)
class Copy:
    """Lay `sources` (paths relative to the build context) at or below the absolute path `target`."""

    sources: tuple[str, ...]
    target: str
    into: bool  # target is a directory that takes the sources under their own names
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """A shell line that only arranges files. `line` is its number in the Dockerfile."""

    command: str
    cwd: str
    env: dict[str, str]
    line: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a Dockerfile asks for. `refused` names what needs a container engine; empty if nothing does."""

    base: str
    workdir: str
    env: dict[str, str]
    steps: tuple[Copy | Run, ...]
    refused: tuple[str, ...]


def parse(text: str) -> Recipe:
    """Never raises: what cannot be understood is among `refused`."""
    reader = _Reader()
    for number, line in _logical_lines(text):
        keyword, _, rest = line.partition(" ")
        try:
            reader.take(keyword.upper(), rest.strip(), number)
        except (_Refused, ValueError) as refusal:
            reader.refused.append(f"line {number} ({_shorten(line)}): {refusal}")
    return Recipe(reader.base, reader.workdir, reader.env, tuple(reader.steps), tuple(reader.refused))


def read(context: Path) -> Recipe:
    """The Dockerfile in a build context, an empty recipe where there is none.

    Raises `UserError` when it copies what the context does not have, or is no text.
    """
    path = context / "Dockerfile"
    try:
        recipe = parse(path.read_text(encoding="utf-8") if path.is_file() else "")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}.") from None
    refused = [f"{path}, {reason}" for reason in recipe.refused]
    if (ignored := context / ".dockerignore").exists():
        refused.append(str(ignored))
    if not refused:
        for step in recipe.steps:
            if isinstance(step, Copy):
                try:
                    sources(context, step)
                except FileNotFoundError as missing:
                    raise UserError(f"{path} copies {missing}, which does not exist.") from None
    return replace(recipe, refused=tuple(refused))


async def carry_out(recipe: Recipe, context: Path, sandbox: Sandbox, seconds: float) -> None:
    """Do in a fresh sandbox what the Dockerfile would do to an image, each RUN within `seconds`.

    Raises `SandboxError` naming the line that failed.
    """
    for step in recipe.steps:
        if isinstance(step, Run):
            done = await sandbox.exec(step.command, cwd=step.cwd, env=step.env, timeout=seconds)
            if done.exit_code != 0:
                raise SandboxError(
                    f"Line {step.line} of {context / 'Dockerfile'} failed with status {done.exit_code}: "
                    f"{(done.stderr or done.stdout).strip()[-300:]}"
                )
            continue
        for source, target in sources(context, step):
            await sandbox.upload(source, target)
            if step.mode is not None:
                await sandbox.exec(f"chmod -R {step.mode} {shlex.quote(target)}", cwd="/")


class _Refused(Exception):
    pass


class _Reader:
    def __init__(self) -> None:
        self.base = ""
        self.workdir = "/"
        self.env: dict[str, str] = {}
        self.steps: list[Copy | Run] = []
        self.refused: list[str] = []
        self._arguments: dict[str, str] = {}

    def take(self, keyword: str, rest: str, line: int) -> None:
        if keyword in _IGNORED:
            return
        if not rest:
            raise _Refused("it says nothing")
        if "<<" in rest:
            raise _Refused("here-documents are not interpreted")
        match keyword:
            case "FROM":
                self._from(rest)
            case "ARG":
                name, _, default = rest.partition("=")
                self._arguments[name.strip()] = self._expand(default.strip().strip("\"'"))
            case "ENV":
                self._env(rest)
            case "WORKDIR":
                self.workdir = self._path(self._expand(rest))
                self.steps.append(Run(f"mkdir -p {shlex.quote(self.workdir)}", "/", {}, line))
            case "COPY" | "ADD":
                self._copy(keyword, rest)
            case "RUN":
                self._run(rest, line)
            case "USER" if rest in ("root", "0", "root:root", "0:0"):
                pass
            case _:
                raise _Refused(f"{keyword} is not interpreted")

    def _from(self, rest: str) -> None:
        if self.base:
            raise _Refused("builds in several stages are not interpreted")
        self.base = self._expand(next((word for word in rest.split() if not word.startswith("--")), ""))
        name = (
            self.base.partition("@")[0].partition(":")[0].removeprefix("docker.io/").removeprefix("library/")
        )
        if name not in PLAIN_BASES:
            raise _Refused("this image holds more than a plain system")

    def _env(self, rest: str) -> None:
        words = shlex.split(rest)
        if "=" not in rest.split()[0]:  # the old form: ENV NAME the rest of the line
            name, _, value = rest.partition(" ")
            words = [f"{name}={value.strip()}"]
        for word in words:
            name, equals, value = word.partition("=")
            if not equals:
                raise _Refused("this form of ENV is not interpreted")
            self.env[name] = self._expand(value)

    def _copy(self, keyword: str, rest: str) -> None:
        words = _listed(rest) or shlex.split(rest)
        mode = None
        while words and words[0].startswith("--"):
            flag, _, value = words.pop(0).partition("=")
            if flag == "--chmod" and re.fullmatch("[0-7]{3,4}", value):
                mode = value
            elif flag != "--chown" or value not in ("root", "root:root", "0", "0:0"):
                raise _Refused(f"the flag {flag}={value} is not interpreted")
        if len(words) < 2:
            raise _Refused("it has no target")
        *sources, target = (self._expand(word) for word in words)
        if keyword == "ADD" and any(
            "://" in source or ".tar" in source or ".tgz" in source for source in sources
        ):
            raise _Refused("ADD of a URL or an archive is not interpreted")
        if any(".." in PurePosixPath(source).parts for source in sources):
            raise _Refused("a source lies outside the build context")
        into = target.endswith(("/", "/.")) or target == "." or len(sources) > 1
        self.steps.append(Copy(tuple(sources), self._path(target), into, mode))

    def _run(self, rest: str, line: int) -> None:
        command = shlex.join(_listed(rest)) or rest
        for program in _programs(command):
            if program not in PLAIN_PROGRAMS:
                raise _Refused(f"it runs {program}")
        self.steps.append(Run(command, self.workdir, self._arguments | self.env, line))

    def _path(self, path: str) -> str:
        joined = PurePosixPath(self.workdir, path)
        if ".." in joined.parts:
            raise _Refused("the path has '..' in it")
        if joined.parts[1:2] and joined.parts[1] in READ_ONLY:
            raise _Refused(f"/{joined.parts[1]} is read-only in a sandbox without images")
        return str(joined)

    def _expand(self, text: str) -> str:
        expanded = _VARIABLE.sub(lambda match: self._value(match[1] or match[2]), text)
        if "${" in expanded:
            raise _Refused("this form of substitution is not interpreted")
        return expanded

    def _value(self, name: str) -> str:
        known = self._arguments | self.env
        if name == "PATH" and name not in known:
            return SYSTEM_PATH
        return known.get(name, "")


def sources(context: Path, step: Copy) -> list[tuple[Path, str]]:
    """The host paths of a COPY, each with its absolute path inside. Raises `FileNotFoundError`."""
    found: list[tuple[Path, str]] = []
    for pattern in step.sources:
        relative = pattern.strip("/") or "."
        if any(letter in relative for letter in "*?["):
            paths = sorted(context.glob(relative))
        else:
            paths = [path] if (path := context / relative).exists() else []
        if not paths:
            raise FileNotFoundError(f"{context / relative}")
        # A directory's content goes to the target; a file under its own name, or as the target itself.
        into = step.into or len(paths) > 1
        found += [
            (path, f"{step.target}/{path.name}" if path.is_file() and into else step.target) for path in paths
        ]
    return found


def _listed(rest: str) -> list[str]:
    """The words of an instruction in its JSON form; empty for any other form."""
    if not rest.startswith("["):
        return []
    words = json.loads(rest)
    if not all(isinstance(word, str) for word in words):
        raise _Refused("a list of texts is expected")
    return list(words)


def _logical_lines(text: str) -> list[tuple[int, str]]:
    """Instructions with the number of their first line; comments dropped, continuations joined."""
    lines: list[tuple[int, str]] = []
    pending, started = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        started = started or number
        if line.rstrip().endswith("\\"):
            pending += line.rstrip()[:-1]
            continue
        lines.append((started, (pending + line).strip()))
        pending, started = "", 0
    if pending.strip():
        lines.append((started, pending.strip()))
    return lines


def _programs(command: str) -> list[str]:
    """The program of every simple command in a shell line without substitutions or groups."""
    if "`" in command or "$(" in command:
        raise _Refused("it substitutes a command")
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.commenters = ""
    programs, first = [], True
    for word in lexer:
        if word in _OPERATORS:
            first = True
        elif set(word) <= set("();<>|&") and ("(" in word or ")" in word or word in ("&", "<(", ">(")):
            raise _Refused("this shell syntax is not interpreted")
        elif first and not re.match(r"\w+=", word):
            programs.append(word)
            first = False
    return programs


def _shorten(line: str) -> str:
    return line if len(line) <= 60 else line[:57] + "..."
