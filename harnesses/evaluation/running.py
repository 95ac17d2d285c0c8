"""Running an evaluation: many attempts at many tasks, so many at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from titogym.envs.task import Task
from titogym.errors import UserError
from titogym.gateway.client import GatewayClient, GatewayError
from titogym.harnesses.episode import EpisodeResult
from titogym.harnesses.evaluation.records import EpisodeRecord, EvaluationDirectory

UNBEGUN = 16  # episodes in a row that could not begin, after which none is taken to be able to

# Makes attempt `number` at a task, and leaves its session open.
RunAttempt = Callable[[Task, int], Awaitable[EpisodeResult]]
Conversation = Sequence[Mapping[str, Any]]


async def evaluate(
    due: Sequence[tuple[Task, int]],
    directory: EvaluationDirectory,
    run: RunAttempt,
    client: GatewayClient,
    *,
    concurrency: int,
    started: Callable[[Task, int], None],
    ended: Callable[[EpisodeRecord], None],
) -> None:
    """Make the attempts `due`, at most `concurrency` at a time, and keep each in `directory` as it ends.

    Cancellation cancels those in flight; they clean up after themselves and are not kept. Raises `UserError`
    when an episode cannot be written, or when `UNBEGUN` in a row could not even begin.
    """
    unbegun = 0
    queue = iter(due)

    async def work() -> None:
        nonlocal unbegun
        for task, attempt in queue:
            started(task, attempt)
            result = await run(task, attempt)
            turns = await conversation(result, client)
            more = {"instruction": task.instruction, "environment": task.environment, "split": task.split}
            record = await asyncio.to_thread(directory.add, result, attempt, turns, **more)
            ended(record)
            unbegun = unbegun + 1 if record.outcome in ("setup_error", "gateway_error") else 0
            if unbegun >= UNBEGUN:
                raise UserError(
                    f"{unbegun} episodes in a row could not begin. The last one says: {record.error}"
                )

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(due))):
                group.create_task(work())
    except* UserError as errors:
        raise errors.exceptions[0] from None


async def conversation(result: EpisodeResult, client: GatewayClient) -> Conversation:
    """The turns of an episode's session, which is deleted then."""
    if result.session_id is None:
        return []
    try:
        return await client.turns(result.session_id)
    except GatewayError:  # the result says so already
        return []
    finally:
        await _delete(result.session_id, client)


async def _delete(session: str, client: GatewayClient) -> None:
    try:
        await client.delete(session)
    except GatewayError:
        return  # it ends by its time to live
