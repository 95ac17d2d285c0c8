"""The keys of a Harbor `task.toml` (schema versions 1.0 to 1.4), checked by type.

What they mean for a sandbox is said in `terminal_bench`. Keys that the schema does not have are kept in
`model_extra`: the format evolves.
"""

import ipaddress
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from titogym.errors import UserError

_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*/[a-zA-Z0-9][a-zA-Z0-9._-]*")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMG])", re.IGNORECASE)
_SCALE = {"K": 1 / 1024, "M": 1, "G": 1024}
_HOST = re.compile(r"(\*\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*")

NetworkMode = Literal["public", "no-network", "allowlist"]


def host(value: str) -> str:
    """A host name, `*.name`, IP address or CIDR range, in its normal form. Raises `ValueError`."""
    text = value.strip().lower().rstrip(".")
    try:
        return ipaddress.ip_network(text).compressed if "/" in text else ipaddress.ip_address(text).compressed
    except ValueError:
        if not _HOST.fullmatch(text):
            raise ValueError("an allowed host is a host name, *.name, an IP address or a range") from None
        if text.startswith("*.") and text[2:].replace(".", "").isdigit():
            raise ValueError("an address cannot have a wildcard") from None
        return text


def _variables(value: object) -> object:
    for name, text in value.items() if isinstance(value, dict) else ():
        if not name or "=" in name or "\0" in name + str(text):
            raise ValueError(f"no process can have {name!r} as a variable")
    return value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Megabytes = Annotated[int, Field(gt=0, le=1 << 30)]  # a PiB: more overflows what kernels count in bytes
Variables = Annotated[dict[str, str], BeforeValidator(_variables)]
User = str | int


class Table(BaseModel):
    """A TOML table. Its unknown keys are tolerated, and remembered."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def unknown(self, prefix: str = "") -> Iterator[str]:
        """Dotted names of the keys that the schema does not have."""
        for key in self.model_extra or {}:
            yield prefix + key
        for key in type(self).model_fields:
            value = getattr(self, key)
            if isinstance(value, Table):
                yield from value.unknown(f"{prefix}{key}.")


class Phase(Table):
    """What the agent's and the verifier's tables have in common: the network in that phase."""

    network_mode: NetworkMode | None = None
    allowed_hosts: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _hosts(self) -> "Phase":
        if self.allowed_hosts and self.network_mode != "allowlist":
            raise ValueError("allowed_hosts needs network_mode = 'allowlist'")
        for name in self.allowed_hosts or ():
            host(name)
        return self

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(host(name) for name in self.allowed_hosts or ())


class Healthcheck(Table):
    """Run after the start until it succeeds; failures within `start_period_sec` do not count."""

    command: str
    interval_sec: Seconds = 5.0
    timeout_sec: Seconds = 30.0
    start_period_sec: float = Field(0.0, ge=0, allow_inf_nan=False)
    start_interval_sec: Seconds = 5.0
    retries: int = Field(3, ge=1)


class EnvironmentTable(Phase):
    build_timeout_sec: Seconds = 600.0
    docker_image: str | None = None
    os: Annotated[Literal["linux", "windows"], BeforeValidator(_lower)] = "linux"
    cpus: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] | None = None  # kernels grant no less
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0)] | None = None
    gpu_types: list[str] | None = None
    tpu: dict[str, Any] | None = None
    mcp_servers: list[dict[str, Any]] = []
    env: Variables = {}
    skills_dir: str | None = None
    healthcheck: Healthcheck | None = None
    workdir: str | None = None
    allow_internet: bool | None = None  # before network_mode there was this

    @model_validator(mode="before")
    @classmethod
    def _older_sizes(cls, data: Any) -> Any:
        """`memory = "2G"` is today's `memory_mb = 2048`."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        for old, new in (("memory", "memory_mb"), ("storage", "storage_mb")):
            if (text := data.pop(old, None)) is not None:
                size = _megabytes(text, f"environment.{old}")
                if data.setdefault(new, size) != size:
                    raise ValueError(f"{old} = {text!r} contradicts {new} = {data[new]!r}")
        return data

    @property
    def network(self) -> NetworkMode | None:
        """The network of all phases, None where the task does not say."""
        if self.network_mode is None and self.allow_internet is not None:
            return "public" if self.allow_internet else "no-network"
        return self.network_mode


class AgentTable(Phase):
    timeout_sec: Seconds | None = None
    user: User | None = None


class VerifierTable(Phase):
    timeout_sec: Seconds = 600.0
    env: Variables = {}
    user: User | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: dict[str, Any] | None = None
    collect: list[dict[str, Any]] = []


class SolutionTable(Table):
    env: Variables = {}


class PackageTable(Table):
    name: str
    version: str | None = Field(None, min_length=1)
    description: str = ""
    authors: list[dict[str, Any]] = []
    keywords: list[str] = []

    @model_validator(mode="after")
    def _name(self) -> "PackageTable":
        if not _NAME.fullmatch(self.name) or ".." in self.name:
            raise ValueError(f"the name {self.name!r} must have the form organisation/name")
        return self


class TaskToml(Table):
    schema_version: str = "1.4"
    source: str | None = None
    multi_step_reward_strategy: Literal["mean", "final"] | None = None
    task: PackageTable | None = None
    metadata: dict[str, Any] = {}
    verifier: VerifierTable = VerifierTable()
    agent: AgentTable = AgentTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    steps: list[dict[str, Any]] | None = None
    artifacts: list[str | dict[str, Any]] = []

    @model_validator(mode="before")
    @classmethod
    def _older_version(cls, data: Any) -> Any:
        if isinstance(data, dict) and "version" in data:
            data = {"schema_version": data["version"], **data}
            del data["version"]
        return data


def read(path: Path, text: str) -> TaskToml:
    """Raises `UserError` naming `path` and the first key that is wrong."""
    try:
        return TaskToml.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"] if not _is_union_branch(part))
        value = f" is {first['input']!r}" if not isinstance(first["input"], dict) else ""
        reason = first["msg"].removeprefix("Value error, ")
        raise UserError(f"{path}: {key}{value}: {reason[0].lower()}{reason[1:]}.") from None


def _megabytes(text: object, key: str) -> int:
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ValueError(f'{key} is {text!r}; write a size such as "2G" or "512M"')
    return max(1, int(float(match[1]) * _SCALE[match[2].upper()]))


def _is_union_branch(part: int | str) -> bool:
    """Whether pydantic names a type here instead of a key."""
    return part in ("str", "int", "float") or str(part).startswith("dict[")


def inside(path: str) -> PurePosixPath | None:
    """An absolute path without `..`, None for any other."""
    parts = PurePosixPath(path)
    return parts if parts.is_absolute() and ".." not in parts.parts else None
