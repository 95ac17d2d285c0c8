"""How much memory the whole quickstart takes at its peak, and how much an idle gateway takes.

    python benchmarks/memory.py [--steps N]

Runs `titogym quickstart` in a temporary folder and adds up the proportional set size (PSS: shared pages
counted once) of all its processes four times a second. Limits: 12 GiB and 200 MB.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil

from titogym.gateway import launch as gateway

KINDS = {
    "sglang": "engine",
    "titogym.trainer": "trainer",
    "serve": "gateway",
    "quickstart": "driver",
}
MIB = 1 << 20


def kind(process: psutil.Process) -> str:
    words = " ".join(process.cmdline())
    return next((name for mark, name in KINDS.items() if mark in words), "sandboxes")


def memory_by_kind(root: psutil.Process) -> Counter[str]:
    """PSS in bytes of `root` and everything below it."""
    used: Counter[str] = Counter()
    for process in [root, *root.children(recursive=True)]:
        try:
            used[kind(process)] += process.memory_full_info().pss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended while we looked
    return used


def quickstart_peak(directory: Path, steps: int) -> Counter[str]:
    """Memory by kind of process at the moment when the sum was highest."""
    command = ["-m", "titogym", "quickstart", "--dir", str(directory), "--set", f"run.steps={steps}"]
    driver = subprocess.Popen([sys.executable, *command])
    watched, peak = psutil.Process(driver.pid), Counter[str]()
    while driver.poll() is None:
        try:
            now = memory_by_kind(watched)
        except psutil.NoSuchProcess:
            break
        peak = max(peak, now, key=Counter.total)
        time.sleep(0.25)
    if driver.wait() != 0:
        sys.exit("the quickstart failed; its output above says why")
    return peak


def idle_gateway(model_dir: Path, logs: Path) -> int:
    """Resident bytes of a gateway that has started and serves nobody."""
    served = gateway.launch(["http://127.0.0.1:9"], model_dir, directory=logs)
    try:
        time.sleep(1)
        resident: int = psutil.Process(served.child.pid).memory_info().rss
        return resident
    finally:
        served.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=3, help="steps of the quickstart (default: 3)")
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory(prefix="titogym-memory-") as folder:
        directory = Path(folder)
        peak = quickstart_peak(directory / "quickstart", steps)
        idle = idle_gateway(directory / "quickstart" / "model", directory)
    print(f"\nquickstart, peak of all processes: {peak.total() / MIB:,.0f} MiB (limit 12,288)")
    for name, used in peak.most_common():
        print(f"  {name:<10} {used / MIB:8,.0f} MiB")
    print(f"idle gateway, resident: {idle / 1e6:,.0f} MB (limit 200)")
    sys.exit(peak.total() > 12 << 30 or idle > 200e6)


if __name__ == "__main__":
    main()
