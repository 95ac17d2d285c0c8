"""How weights travel to the engines. No torch here: drivers build these settings."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

MoverName = Literal["broadcast", "handoff", "disk", "p2p"]
Mode = Literal["retract", "in_place", "abort"]


@dataclass(frozen=True, slots=True)
class WeightSettings:
    """`mode` is what happens to requests in flight while weights change.

    "retract" puts them back into the queue and drops their keys and values, so that what they sample
    afterwards sees the new weights alone; "in_place" keeps the keys and values of the old weights;
    "abort" ends the requests with what they have.
    """

    mover: MoverName = "broadcast"
    mode: Mode = "retract"
    bucket_bytes: int = 512 * 2**20  # most bytes of one bucket; what may not be cut travels alone
    expert_factor: int = 1  # ranks that hold experts: an expert's bytes count this many times in a bucket
    timeout: float = 120.0  # seconds that any one step of an update may take
    # Movers through files: where versions are written, which the engines read as well.
    directory: Path | None = None
    model_dir: Path | None = None  # config.json and tokenizer that a version's files are served with
    encoding: Literal["xor", "overwrite"] = "xor"
    rebase_every: int = 20  # versions after which one is written whole again
