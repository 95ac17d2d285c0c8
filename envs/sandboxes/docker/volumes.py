"""Trees that a container sees at a path of their own, from before its first process starts.

A volume is filled through a container that never runs, so it works for engines on other machines, and
nothing inside has a hand in it.
"""

from collections.abc import Mapping
from typing import IO

from titogym.envs.sandboxes import archives
from titogym.envs.sandboxes.docker.engine import Engine

_INSIDE = "/volume"


def mount(volume: str, target: str, *, read_only: bool) -> dict[str, object]:
    """A volume at the absolute path `target`, in the engine's words. What the image has there is hidden."""
    return {
        "Type": "volume",
        "Source": volume,
        "Target": target,
        "ReadOnly": read_only,
        "VolumeOptions": {"NoCopy": True},
    }


async def fill(engine: Engine, image: str, name: str, tree: archives.Tree, labels: Mapping[str, str]) -> None:
    """Make the volume `name` with the content of `tree`, which everybody may read."""
    await engine.long_call(
        lambda: _fill(engine, image, name, archives.pack(tree, "/", public=True), _INSIDE, _INSIDE, labels)
    )


async def refill(
    engine: Engine, image: str, name: str, archive: IO[bytes], top: str, labels: Mapping[str, str]
) -> None:
    """Make the volume `name` as the directory that is `top` in a tar archive, with its owner and mode."""
    at = f"{_INSIDE}/{top}"
    await engine.long_call(lambda: _fill(engine, image, name, archive, at, _INSIDE, labels))


def _fill(
    engine: Engine,
    image: str,
    name: str,
    archive: bytes | IO[bytes],
    at: str,
    unpacked_in: str,
    labels: Mapping[str, str],
) -> None:
    api = engine.api
    api.create_volume(name, labels=dict(labels))
    helper = api.create_container(
        image,
        entrypoint=["/"],
        labels=dict(labels),
        network_disabled=True,
        host_config=api.create_host_config(mounts=[mount(name, at, read_only=False)]),
    )["Id"]
    try:
        api.put_archive(helper, unpacked_in, archive)
    finally:
        api.remove_container(helper, force=True, v=True)
