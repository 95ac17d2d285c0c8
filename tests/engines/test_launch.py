"""Command line, failures and life of engine processes; SGLang itself is played by a double."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.engines.processes import eventually, family, running
from titogym.errors import UserError
from titogym.gateway.engines import environment
from titogym.gateway.engines.launch import EngineOptions, answers, engine_command, launch

ROOT = Path(__file__).parents[2]
FAKE = ROOT / "tests" / "doubles" / "fake_sglang"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def fake_sglang(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment in which `sglang` can be imported, as on a GPU machine with SGLang installed."""
    path = os.pathsep.join([str(FAKE), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.syspath_prepend(str(FAKE))
    return {**os.environ, "PYTHONPATH": path}


def options_of(command: list[str]) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for i, word in enumerate(command):
        if word.startswith("--"):
            value = command[i + 1] if i + 1 < len(command) else "--"
            found[word] = None if value.startswith("--") else value
    return found


def test_cpu_command(model: Path) -> None:
    options = EngineOptions(str(model), port=31000, device="cpu", dtype="float32", seed=4, threads=2)
    command, env = engine_command(options, Path("/venv/python"))
    assert command[:3] == ["/venv/python", "-m", "sglang.launch_server"]
    said = options_of(command)
    assert said["--model-path"] == str(model)
    assert said["--device"] == "cpu"
    assert said["--random-seed"] == "4"
    assert said["--max-total-tokens"] == "65536"
    assert {"--incremental-streaming-output", "--sleep-on-idle", "--disable-cuda-graph"} <= said.keys()
    assert not {"--context-length", "--mem-fraction-static", "--enable-return-routed-experts"} & said.keys()
    assert env["OMP_NUM_THREADS"] == "2"
    assert (Path(env["PYTHONPATH"]) / "sitecustomize.py").is_file()


def test_a_relative_model_is_served_by_its_whole_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks the engine for its tokenizer may stand in another folder."""
    monkeypatch.chdir(model.parent)
    command, _ = engine_command(EngineOptions(model.name, device="cpu"), Path("python"))
    assert options_of(command)["--model-path"] == str(model)


def test_cuda_command_has_nothing_of_the_cpu(model: Path) -> None:
    options = EngineOptions(
        str(model), device="cuda", tensor_parallel=2, expert_routes=True, extra=("--x", "1")
    )
    command, env = engine_command(options, Path("python"))
    said = options_of(command)
    assert said["--tensor-parallel-size"] == "2"
    assert "--enable-return-routed-experts" in said
    assert command[-2:] == ["--x", "1"]
    assert not {"--attention-backend", "--disable-cuda-graph", "--max-total-tokens"} & said.keys()
    assert not {"PYTHONPATH", "SGLANG_USE_CPU_ENGINE"} & env.keys()


@pytest.mark.parametrize(
    ("config", "asked", "served"),
    [
        ('{"dtype": "float32"}', "auto", "float32"),  # SGLang's own auto would make it float16
        ('{"torch_dtype": "bfloat16"}', "auto", "bfloat16"),
        ("{}", "auto", "auto"),
        ('{"dtype": "float32"}', "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_precision_of_the_model(model: Path, config: str, asked: str, served: str) -> None:
    (model / "config.json").write_text(config)
    command, _ = engine_command(EngineOptions(str(model), dtype=asked), Path("python"))
    assert options_of(command)["--dtype"] == served


def test_device_follows_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(environment, "_NVIDIA_GPUS", tmp_path / "gpus")
    assert environment.default_device() == "cpu"
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert environment.default_device() == "cuda"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert environment.default_device() == "cpu"


def test_not_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        launch(EngineOptions(str(tmp_path)), tmp_path / "log")


def test_port_taken(model: Path, fake_sglang: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*another port"):
            launch(EngineOptions(str(model), port=port, device="cuda"), model / "log")


def test_a_failed_start_says_why(model: Path, fake_sglang: dict[str, str]) -> None:
    options = EngineOptions(str(model), device="cuda", extra=("--crash",))
    with pytest.raises(UserError, match=r"did not start: RuntimeError: no memory for the KV cache \(its log"):
        launch(options, model / "log")


def test_launch_and_stop(model: Path, fake_sglang: dict[str, str]) -> None:
    engine = launch(EngineOptions(str(model), device="cuda"), model / "log")
    processes = family(engine.child.pid)
    assert httpx.get(engine.url + "/model_info").json()["model_path"] == str(model)
    engine.stop()
    assert not running(processes)
    assert not answers(engine.url)
    engine.stop()


@pytest.fixture
def cli(model: Path, fake_sglang: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", "titogym", "engine", str(model), "--device", "cuda", "--port", "0"]
    command += ["--log", str(model / "log"), "--", "--schedule-policy", "lpm"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=fake_sglang, cwd=ROOT
    )
    yield process
    process.kill()
    process.communicate()


def url_of(cli: "subprocess.Popen[str]") -> str:
    assert cli.stdout is not None
    return cli.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_the_engine_ends_with_its_command(cli: "subprocess.Popen[str]", model: Path, number: int) -> None:
    url = url_of(cli)
    assert answers(url)
    assert "--schedule-policy lpm" in (model / "log").read_text()
    processes = family(cli.pid)
    assert len(processes) >= 2
    cli.send_signal(number)
    assert cli.wait(10) == {signal.SIGTERM: 143, signal.SIGINT: 0, signal.SIGKILL: -9}[signal.Signals(number)]
    assert eventually(lambda: not running(processes))
    assert not answers(url)


def test_the_command_says_when_the_engine_died(cli: "subprocess.Popen[str]") -> None:
    url_of(cli)
    (engine,) = family(cli.pid)[1:]
    engine.kill()
    _, said = cli.communicate(timeout=10)
    assert cli.returncode == 2
    assert "SGLang ended with status -9" in said


def test_unknown_device_is_one_sentence(model: Path) -> None:
    command = [sys.executable, "-m", "titogym", "engine", str(model), "--device", "tpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "choose auto, cpu or cuda" in done.stderr


SHIM_PROBE = """
import json, sys
import triton, triton.language as tl
from torchvision.transforms import InterpolationMode
@triton.jit
def kernel(x): return x + 1
@triton.autotune(configs=[triton.Config({"B": 1}, num_warps=4)], key=["n"])
def other(x): return x
class Mine(tl.Something): pass
try:
    tl.dot(1, 2) + 1
except TypeError:
    silent = False
else:
    silent = True
import json as real
print(json.dumps({"kernel": kernel(1), "other": other(2), "member": str(InterpolationMode.BICUBIC),
                  "silent": silent, "missing": not hasattr(sys.modules.get("sgl_kernel"), "x")}))
try:
    import a_package_that_is_not_there
except ModuleNotFoundError:
    print("ok")
"""


def test_shim_stubs_only_what_is_missing(tmp_path: Path) -> None:
    shim = str(Path(environment.__file__).parent / "cpu_shim")
    probe = [sys.executable, "-S", "-c", "import sitecustomize\n" + SHIM_PROBE]
    done = subprocess.run(probe, capture_output=True, text=True, env={"PYTHONPATH": shim})
    first, second = done.stdout.splitlines() or [done.stderr, ""]
    assert json.loads(first) == {
        "kernel": 2,
        "other": 2,
        "member": "InterpolationMode.BICUBIC",
        "silent": False,
        "missing": True,
    }
    assert second == "ok"
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("real = True")
    real = [sys.executable, "-S", "-c", "import sitecustomize, triton; print(triton.real)"]
    path = os.pathsep.join([shim, str(tmp_path)])
    done = subprocess.run(real, capture_output=True, text=True, env={"PYTHONPATH": path})
    assert done.stdout == "True\n", done.stderr
