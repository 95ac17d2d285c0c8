"""The labels of sandboxes that live outside this machine, and what they say of a leftover.

Every sandbox bears them from the call that creates it: whose it is, for which run and episode, and until
when it is spared by a reaper that cannot see its driver.
"""

import time
from collections.abc import Mapping

from titogym.envs.sandboxes import owners
from titogym.envs.sandboxes.base import SandboxSpec

PREFIX = "titogym."
ID = PREFIX + "id"  # the sandbox's own id; its presence marks what is ours
OWNER = PREFIX + "owner"  # the driver process
EXPIRES = PREFIX + "expires"  # seconds since the epoch


def labels(sandbox_id: str, spec: SandboxSpec, common: Mapping[str, str]) -> dict[str, str]:
    """What the sandbox `sandbox_id` is to bear. `common` are the labels of all the backend's sandboxes."""
    return {
        **{PREFIX + name: value for name, value in {**common, **spec.labels}.items()},
        ID: sandbox_id,
        OWNER: str(owners.me()),
        EXPIRES: str(int(time.time() + spec.lifetime)),
    }


def abandoned(found: Mapping[str, str]) -> bool:
    """Whether something with these labels is ours, and its driver dead or, out of sight, overdue."""
    if ID not in found:
        return False
    owner = owners.parse(found.get(OWNER, ""))
    if owner is not None and owner.visible():
        return owner.dead()
    try:
        return time.time() > float(found[EXPIRES])
    except (KeyError, ValueError):
        return False
