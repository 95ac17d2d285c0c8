"""The container of a sandbox as the engine is asked for it: rights, limits, what it sees."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from titogym.envs.sandboxes.base import SandboxSpec

OWN_PROCESSES = 2  # the engine's init and what keeps the container alive
OOM_COUNTERS = ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control")
_MIB = 1 << 20
_OPEN_FILES = 16_384  # of one process
# What commands that install software, change users or serve need; none of it reaches beyond the container.
_CAPABILITIES = [
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "NET_BIND_SERVICE",
    "SETGID",
    "SETUID",
    "SYS_CHROOT",
]


def create(
    api: Any,
    image: str,
    name: str,
    spec: SandboxSpec,
    *,
    labels: Mapping[str, str],
    environment: Sequence[str],
    mounts: Sequence[Mapping[str, object]],
    network: str,
    limit_disk: bool,
) -> str:
    """Create a container that sleeps; returns the engine's id of it.

    `environment` holds NAME=value pairs; a name alone takes a variable of the image away. `network` is the
    engine's network of an open sandbox.
    """
    from docker import types

    limits = spec.limits
    host = api.create_host_config(
        init=True,
        network_mode=network if spec.network == "open" else "none",
        mem_limit=limits.memory_mb * _MIB,
        memswap_limit=limits.memory_mb * _MIB,
        shm_size=limits.memory_mb * _MIB,
        nano_cpus=round(limits.cpus * 1e9),
        pids_limit=limits.processes + OWN_PROCESSES,
        cap_drop=["ALL"],
        cap_add=_CAPABILITIES,
        security_opt=["no-new-privileges"],
        ulimits=[
            types.Ulimit(name="fsize", soft=limits.storage_mb * _MIB, hard=limits.storage_mb * _MIB),
            types.Ulimit(name="core", soft=0, hard=0),
            types.Ulimit(name="nofile", soft=_OPEN_FILES, hard=_OPEN_FILES),
        ],
        mounts=[*mounts, *_binds(spec)],
        storage_opt={"size": f"{limits.storage_mb}M"} if limit_disk else None,
    )
    made = api.create_container(
        image,
        entrypoint=["sleep", "2147483647"],
        command=[],
        name=name,
        hostname="sandbox",
        labels=dict(labels),
        environment=list(environment),
        working_dir=spec.workdir,
        healthcheck={"test": ["NONE"]},
        host_config=host,
        use_config_proxy=False,
    )
    return str(made["Id"])


def oom_kills(counters: str) -> int:
    """How many processes the kernel has killed for want of memory, from the text of the counters."""
    return next((int(line.split()[1]) for line in counters.splitlines() if line.startswith("oom_kill ")), 0)


def counters_from_outside(pid: int) -> str | None:
    """The memory counters of the container of process `pid`. None where they cannot be seen from here."""
    for path in OOM_COUNTERS:
        with suppress(OSError):
            return Path(f"/proc/{pid}/root{path}").read_text()
    return None


def _binds(spec: SandboxSpec) -> list[Mapping[str, object]]:
    return [
        {"Type": "bind", "Source": str(mount.source.resolve()), "Target": mount.target, "ReadOnly": True}
        for mount in spec.mounts
    ]
