"""dora-rs: messages and Arrow arrays between two Python nodes; its daemon is not pinned.

Without an argument it writes the data flows to a temporary folder and runs them with `dora run`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.workload import (  # noqa: E402
    NUM_IDLE,
    PAUSE_S,
    check,
    decode,
    encode,
    message,
    pin,
    sizes,
    tell,
    tell_payload,
    tell_times,
)

WAIT_S = 5.0
MARK = '{"system"'


def receive(node: Any, timeout: float = WAIT_S) -> Any:
    """The next input, or None where none comes."""
    while True:
        event = node.next(timeout=timeout)
        if event is None or event["type"] in ("INPUT", "STOP"):
            return event if event is not None and event["type"] == "INPUT" else None


def packed(data: bytes) -> Any:
    return pa.array(np.frombuffer(data, np.uint8))


def round_trips(node: Any, count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for number in range(count):
        time.sleep(pause_s)
        one = message(number)
        began = time.monotonic_ns()
        node.send_output("data", packed(encode(one)), {"do": "echo"})
        event = receive(node)
        if event is None:
            break
        decode(event["value"].to_numpy().tobytes())
        times.append(time.monotonic_ns() - began)
    return times


def one_way(node: Any, array: Any, count: int, pause_s: float) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        time.sleep(pause_s)
        began = time.monotonic_ns()
        node.send_output("data", array, {"do": "array"})
        event = receive(node)
        if event is None:
            break
        times.append(int(event["value"][0].as_py()) - began)
    return times


def rate(node: Any, count: int) -> float:
    data = packed(encode(message()))
    began = time.monotonic_ns()
    for _ in range(count):
        node.send_output("data", data, {"do": "take"})
    node.send_output("data", data, {"do": "count"})
    event = receive(node, 30)
    taken = int(event["value"][0].as_py()) if event is not None else 0
    return taken / (time.monotonic_ns() - began) * 1e9


def send() -> None:
    from dora import Node

    pin(0)
    node = Node()
    time.sleep(1)
    round_trips(node, 50, 0)
    tell_times("dora", "round trip hot", round_trips(node, 500, 0))
    tell_times("dora", "round trip idle", round_trips(node, NUM_IDLE, PAUSE_S))
    tell("dora", "rate", rate(node, 2000))
    for name, array, count in sizes():
        times = one_way(node, pa.array(array), max(4, count // 5), 0)
        if len(times) > 1:
            tell_payload("dora", name, times)
        if count > 50:
            tell_payload("dora", f"{name} idle", one_way(node, pa.array(array), 40, PAUSE_S))
    node.send_output("data", packed(b"x"), {"do": "stop"})


def answer() -> None:
    from dora import Node

    pin(1)
    node = Node()
    taken = 0
    while True:
        event = receive(node, 60)
        if event is None:
            return
        do, value = event["metadata"]["do"], event["value"]
        if do == "echo":
            node.send_output("reply", packed(encode(decode(value.to_numpy().tobytes()))), {})
        elif do == "take":
            decode(value.to_numpy().tobytes())
            taken += 1
        elif do == "count":
            node.send_output("reply", pa.array([taken]), {})
            taken = 0
        elif do == "array":
            received = check(value.to_numpy(zero_copy_only=True))
            del value, event
            node.send_output("reply", pa.array([received]), {})
        else:
            return


def boot() -> None:
    from dora import Node

    Node()
    Path(os.environ["BOOT"], str(os.getpid())).write_text(str(time.monotonic()))


def node(name: str, role: str, ports: str = "", environment: str = "") -> str:
    return f"  - id: {name}\n    path: {__file__}\n    args: {role}\n{environment}{ports}"


def run(folder: Path, nodes: str, timeout: float) -> float:
    """Run a data flow and pass on what its nodes have measured; gives the time of its start."""
    file = folder / "flow.yml"
    file.write_text("nodes:\n" + nodes)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    began = time.monotonic()
    try:
        ran = subprocess.run(
            ["dora", "run", str(file)],
            cwd=folder,
            env={**os.environ, "PATH": path},
            timeout=timeout,
            capture_output=True,
            text=True,
        )
        output = ran.stdout + ran.stderr
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode()
    for line in output.splitlines():
        if MARK in line:
            print(line[line.index(MARK) :], flush=True)
    return began


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    boots = folder / "boots"
    boots.mkdir()
    environment = f"    env:\n      BOOT: {boots}\n"
    began = run(folder, "".join(node(f"n{i}", "boot", environment=environment) for i in range(8)), 60)
    times = [float(file.read_text()) for file in boots.iterdir()]
    if len(times) == 8:
        tell("dora", "start of 8", (max(times) - began) * 1e6)
    queue = "        queue_size: 5000\n"
    sender = f"    outputs: [data]\n    inputs:\n      reply:\n        source: receiver/reply\n{queue}"
    receiver = f"    outputs: [reply]\n    inputs:\n      data:\n        source: sender/data\n{queue}"
    run(folder, node("sender", "send", sender) + node("receiver", "answer", receiver), 120)


if __name__ == "__main__":
    {"send": send, "answer": answer, "boot": boot}.get(sys.argv[1] if len(sys.argv) > 1 else "", main)()
