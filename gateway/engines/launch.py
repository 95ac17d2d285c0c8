"""Starting SGLang with the options that token-exact training needs."""

import contextlib
import json
import os
import re
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import psutil

from titogym.errors import UserError
from titogym.gateway.engines.environment import Device, default_device, engine_python
from titogym.processes import Child, free_port, spawn
from titogym.templates.model import check_vocabulary
from titogym.templates.tokenizer import Tokenizer

_CPU_SHIM = Path(__file__).parent / "cpu_shim"
_SCRATCH = "titogym-engine-"
_REASON = re.compile(
    r"^(?:\w*(?:Error|Exception): .+|.* error: .+)$", re.MULTILINE
)  # what stopped it, in its log


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What to serve and how. None leaves the choice to SGLang."""

    model: str  # directory in Hugging Face format
    host: str = "127.0.0.1"
    port: int = 0  # 0: a free one
    device: Device | None = None  # None: the GPU if there is one
    dtype: str = "auto"  # "float32", "bfloat16", ...; "auto": the model's own
    context_length: int | None = None  # most tokens of prompt + output
    max_total_tokens: int | None = None  # size of the KV cache, tokens; on a CPU 65,536 unless given
    max_running_requests: int | None = None
    tensor_parallel: int = 1
    memory_fraction: float | None = None  # of the GPU, for weights and KV cache
    seed: int | None = None
    expert_routes: bool = False  # return each token's experts (MoE models)
    threads: int = 1  # OpenMP threads of a CPU engine
    exact: bool = False  # on a CPU, compute as `cpu_shim.exact_forward` does, for true on-policy training
    extra: tuple[str, ...] = ()  # further arguments, handed to SGLang as they are


def engine_command(options: EngineOptions, python: Path) -> tuple[list[str], dict[str, str]]:
    """The command line and the additions to the environment that start SGLang under interpreter `python`."""
    device = options.device or default_device()
    arguments: dict[str, object] = {
        "model-path": Path(options.model).absolute(),  # it tells others, elsewhere, where its tokenizer is
        "host": options.host,
        "port": options.port,
        "device": device,
        "dtype": _model_dtype(options.model) if options.dtype == "auto" else options.dtype,
        "context-length": options.context_length,
        "max-total-tokens": options.max_total_tokens,
        "max-running-requests": options.max_running_requests,
        "tensor-parallel-size": options.tensor_parallel if options.tensor_parallel > 1 else None,
        "mem-fraction-static": options.memory_fraction,
        "random-seed": options.seed,
        "enable-return-routed-experts": options.expert_routes,
        # Each event carries new tokens only: a stream of n tokens costs n, not n squared.
        "incremental-streaming-output": True,
        # `cached_tokens` in every answer: how the gateway sees that turns share their prefix.
        "enable-cache-report": True,
        # An idle scheduler would spin a whole core.
        "sleep-on-idle": True,
        "skip-server-warmup": True,
        "grammar-backend": "xgrammar",
        "log-level-http": "warning",
    }
    environment: dict[str, str] = {}
    if Path(options.model).is_dir():
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    if device == "cpu":
        arguments |= {
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "disable-overlap-schedule": True,  # it hides launch latency that only GPUs have
            "disable-cuda-graph": True,
            "max-total-tokens": options.max_total_tokens or 65536,
        }
        environment |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "PYTHONPATH": str(_CPU_SHIM),
            "OMP_NUM_THREADS": str(options.threads),
            # Threads that spin at a barrier starve each other where trainer and engine share cores.
            "OMP_WAIT_POLICY": "PASSIVE",
        }
        if options.exact:
            environment["TITOGYM_EXACT_FORWARD"] = "1"
    command = [str(python), "-m", "sglang.launch_server"]
    for name, value in arguments.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            command += [f"--{name}", str(value)]
    return [*command, *options.extra], environment


def _model_dtype(model: str) -> str:
    """The precision that config.json names. SGLang's own `auto` would serve a float32 model in float16."""
    try:
        config = json.loads((Path(model) / "config.json").read_text())
    except OSError:
        return "auto"
    return str(config.get("dtype") or config.get("torch_dtype") or "auto")


@dataclass
class EngineProcess:
    """A running SGLang server, which dies with the process that launched it."""

    url: str
    child: Child
    _scratch: Path

    def alive(self) -> bool:
        return self.child.alive()

    def ending(self) -> str:
        return self.child.ending()

    def stop(self) -> None:
        """Kill the server and its workers. Safe to call twice."""
        self.child.stop(grace=0.0)  # it has nothing to save, and takes seconds to leave when asked to
        shutil.rmtree(self._scratch, ignore_errors=True)


def launch(
    options: EngineOptions,
    log: Path,
    *,
    timeout: float = 300.0,
    report: Callable[[str], None] = lambda line: None,
) -> EngineProcess:
    """Start SGLang and wait until it answers (at most `timeout` seconds).

    Call from the main thread (see `titogym.processes.spawn`). Raises `UserError` with the end of the log
    when the server does not come up.
    """
    if not (Path(options.model) / "config.json").is_file():
        raise UserError(f"{options.model} is no model directory: it has no config.json.")
    if (Path(options.model) / "tokenizer.json").is_file():
        check_vocabulary(Path(options.model), Tokenizer.load(Path(options.model)))
    python = engine_python(options.device, report)
    port = options.port or free_port()
    _check_free(options.host, port)
    command, environment = engine_command(replace(options, port=port), python)
    url = f"http://{'127.0.0.1' if options.host in ('0.0.0.0', '::') else options.host}:{port}"
    scratch = _scratch_folder()
    engine = EngineProcess(
        url, spawn("engine", command, log=log, env={**environment, "TMPDIR": str(scratch)}), scratch
    )
    try:
        engine.child.wait_ready(lambda: answers(url), timeout)
    except UserError as error:
        engine.stop()
        reasons = _REASON.findall(engine.child.log_tail(40))
        raise UserError(
            f"SGLang did not start: {reasons[-1]} (its log: {log})" if reasons else str(error)
        ) from None
    except BaseException:
        engine.stop()
        raise
    return engine


@contextlib.contextmanager
def running(options: EngineOptions, log: Path) -> Iterator[EngineProcess]:
    """`launch` as a context manager: the engine is gone afterwards, whatever happens inside."""
    engine = launch(options, log)
    try:
        yield engine
    finally:
        engine.stop()


def _scratch_folder() -> Path:
    """A folder for the socket files that SGLang leaves behind when it is killed, and when we are.

    Carries our process id, so that folders of dead launchers are known and removed here.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{_SCRATCH}*"):
        owner = folder.name.removeprefix(_SCRATCH).split("-")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{_SCRATCH}{os.getpid()}-"))


def _check_free(host: str, port: int) -> None:
    """SGLang loads the model for a while before it finds out."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise UserError(f"Cannot listen on {host}:{port} ({error.strerror}); choose another port.") from None


def answers(url: str) -> bool:
    """Whether a server at `url` says what model it serves."""
    try:
        return httpx.get(url + "/model_info", timeout=5.0).status_code == 200
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
