"""True on-policy: profiles under which trainer and engine give the same bits for the same token.

A profile names what has been shown to agree exactly. The promise is checked all the same: a run with
`trainer.true_on_policy` ends at the first token whose log-probs differ at all. No torch here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from titogym.errors import UserError

_WIDTHS = ("hidden_size", "intermediate_size", "head_dim")
_WIDTH = 32  # `exact_forward.WIDTH`


@dataclass(frozen=True, slots=True)
class Profile:
    """Both sides compute with `gateway/engines/cpu_shim/exact_forward.py`, in fp32, on one thread."""

    name: str
    architecture: str
    backend: str = "fsdp"
    dtype: str = "float32"
    device: str = "cpu"

    def problems(self, model: Mapping[str, Any], backend: str, dtype: str, device: str) -> list[str]:
        """Why it does not cover this."""
        found = []
        architecture = (model.get("architectures") or ["none"])[0]
        for what, wanted, given in (
            ("the architecture", self.architecture, architecture),
            ("trainer.backend", self.backend, backend),
            ("dtype", self.dtype, dtype),
            ("the device", self.device, device),
        ):
            if wanted != given:
                found.append(f"{what} has to be {wanted}, not {given}")
        odd = [key for key in _WIDTHS if (model.get(key) or _WIDTH) % _WIDTH]
        found += [f"the model's {key} = {model[key]} has to be a multiple of {_WIDTH}" for key in odd]
        return found


PROFILES = (Profile("qwen3-cpu", "Qwen3ForCausalLM"),)


def check(model: Mapping[str, Any], *, backend: str, dtype: str, device: str) -> Profile:
    """The profile that covers the model of this config.json.

    Raises `UserError` when there is none, saying what the nearest one lacks.
    """
    problems = {profile.name: profile.problems(model, backend, dtype, device) for profile in PROFILES}
    for profile in PROFILES:
        if not problems[profile.name]:
            return profile
    name, nearest = min(problems.items(), key=lambda item: len(item[1]))
    raise UserError(
        f"trainer.true_on_policy has no profile for this run; for {name}: {'; '.join(nearest)}. Change that, "
        "or set trainer.true_on_policy to false."
    )
