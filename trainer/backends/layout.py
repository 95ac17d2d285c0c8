"""How a model is spread over the ranks of a trainer. No torch here: drivers build layouts."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of the groups that share a piece of work; their product, without the experts', is the world.

    Experts have a layout of their own over the same ranks: `expert` ranks hold different experts, and
    `expert_tensor` ranks share each matrix of one expert (left out: as many as `tensor`).
    """

    tensor: int = 1  # ranks that share each matrix
    pipeline: int = 1  # ranks that hold consecutive layers
    context: int = 1  # ranks that share the tokens of each sequence
    data: int = 1  # copies of the model, each with its part of the batch; optimizer state is split over them
    expert: int = 1
    expert_tensor: int | None = None

    @property
    def world(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    def problem(self) -> str | None:
        """Why this layout cannot be, or None."""
        expert_block = self.expert * (self.expert_tensor or self.tensor)
        ranks = self.world // self.pipeline
        if ranks % expert_block:
            return (
                f"expert_parallel x expert_tensor_parallel = {expert_block} does not divide the {ranks} "
                "ranks of a pipeline stage (tensor x context x data parallel)"
            )
        return None

    def __str__(self) -> str:
        sizes = {"TP": self.tensor, "PP": self.pipeline, "CP": self.context, "DP": self.data}
        sizes |= {"EP": self.expert, "ETP": self.expert_tensor or 1}
        return " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
