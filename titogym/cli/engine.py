"""`titogym engine`: serve a model with SGLang."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from titogym import venvs
from titogym.errors import UserError
from titogym.processes import free_port


def command(
    model: Annotated[
        Path, typer.Argument(help="Model directory in Hugging Face format.", show_default=False)
    ],
    sglang_options: Annotated[
        list[str] | None, typer.Argument(help="After `--`: handed to SGLang as they are.")
    ] = None,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 30000,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto: the GPU if there is one.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    context_length: Annotated[
        int | None, typer.Option(help="Most tokens of prompt and output.  [default: the model's]")
    ] = None,
    max_total_tokens: Annotated[
        int | None, typer.Option(help="Size of the KV cache in tokens.  [default: 65536 on a CPU]")
    ] = None,
    max_running_requests: Annotated[
        int | None, typer.Option(help="Most requests decoded at once; more wait.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs to spread the model over.")] = 1,
    memory_fraction: Annotated[
        float | None, typer.Option(help="Share of the GPU's memory for weights and KV cache.")
    ] = None,
    threads: Annotated[int, typer.Option(help="CPU threads for the model's arithmetic.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    expert_routes: Annotated[
        bool, typer.Option("--expert-routes", help="Return each token's experts (MoE models).")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that the start may take.")] = 300.0,
    log: Annotated[
        Path | None,
        typer.Option(help="Where SGLang writes its log.  [default: logs/ in titogym's cache]"),
    ] = None,
) -> None:
    """Serve a model with SGLang, set up for exact tokens: ids in, sampled ids and log-probs out.

    Prints the server's URL when it is ready, and stops it on Ctrl-C or SIGTERM. The first start builds
    SGLang's own Python environment. Example with an option of SGLang's own:

    `titogym engine ./my-model --port 30000 -- --chunked-prefill-size 2048`
    """
    from titogym.gateway.engines.launch import EngineOptions, launch

    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device is {device!r}; choose auto, cpu or cuda.")
    options = EngineOptions(
        model=str(model),
        host=host,
        port=port or free_port(),
        device=None if device == "auto" else device,  # type: ignore[arg-type]
        dtype=dtype,
        context_length=context_length,
        max_total_tokens=max_total_tokens,
        max_running_requests=max_running_requests,
        tensor_parallel=tensor_parallel,
        memory_fraction=memory_fraction,
        seed=seed,
        expert_routes=expert_routes,
        threads=threads,
        extra=tuple(sglang_options or ()),
    )
    log = log or venvs.home() / "logs" / f"engine-{options.port}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as error:
        raise UserError(f"Cannot write the log {log}: {error.strerror}; choose another --log.") from None
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    typer.echo(f"Starting SGLang with {model}; its log: {log}", err=True)
    engine = launch(options, log, timeout=timeout, report=lambda line: typer.echo(line, err=True))
    try:
        typer.echo(engine.url)
        status = engine.child.process.wait()
    except KeyboardInterrupt:
        return
    finally:
        engine.stop()
    raise UserError(f"SGLang ended with status {status}; the end of {log}:\n{engine.child.log_tail()}")
