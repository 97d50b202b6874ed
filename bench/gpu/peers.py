"""What omniflow's lanes are compared with, and what they rest on: torch's queue of tensors, torch.distributed, NCCL's
calls, a copy from GPU to GPU, events of other processes. For `bench.gpu.transports`.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as distributed

from omniflow.transport.nccl_library import Communicator, _library, new_id

SIZES = [2**16, 2**20, 2**22, 2**24, 2**26]
STREAMED = 200
"""Values one behind the other, for GB/s."""
PORT = 29611


def repeats_of(size: int) -> int:
    return 300 if size <= 2**22 else 100


def spread(name: str, seconds: list[float]) -> dict[str, float]:
    values = np.array(seconds[len(seconds) // 5 :]) * 1e6
    return {
        f"{name}_p50_us": round(float(np.median(values)), 1),
        f"{name}_p99_us": round(float(np.percentile(values, 99)), 1),
    }


def torch_queue_child(tensors: Any, times: Any) -> None:
    while True:
        value = tensors.get()
        if value is None:
            return
        held = time.perf_counter()
        torch.cuda.synchronize()
        ready = time.perf_counter()
        del value
        times.put((held, ready))


def torch_queue() -> dict[str, Any]:
    """torch.multiprocessing: a queue of tensors, on the same GPU."""
    context = torch.multiprocessing.get_context("spawn")
    tensors, times = context.Queue(), context.Queue()
    process = context.Process(target=torch_queue_child, args=(tensors, times), daemon=True)
    process.start()
    rows = {}
    for size in SIZES:
        tensor = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        held, ready = [], []
        for _ in range(repeats_of(size)):
            began = time.perf_counter()
            tensors.put(tensor)
            found = times.get(timeout=30)
            held.append(found[0] - began)
            ready.append(found[1] - began)
        rows[str(size)] = {**spread("held", held), **spread("ready", ready)}
    tensors.put(None)
    process.join(10)
    return rows


def bare_nccl_rank(rank: int, rounds: dict[int, int], results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", rank))
    rows = {}
    for size, repeats in rounds.items():
        ours, theirs = (torch.ones(size, dtype=torch.uint8, device="cuda") for _ in range(2))
        seconds = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            began = time.perf_counter()
            if rank == 0:
                distributed.send(ours, 1)
                distributed.recv(theirs, 1)
            else:
                distributed.recv(theirs, 0)
                distributed.send(ours, 0)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / 2)
        rows[str(size)] = spread("half_round_trip", seconds)
        if size >= 2**24:
            rows[str(size)]["stream_gb_s"] = round(sorted(bare_stream(rank, ours) for _ in range(5))[2], 1)
    if rank == 0:
        results.put(rows)
    distributed.destroy_process_group()


def bare_stream(rank: int, tensor: torch.Tensor) -> float:
    """GB/s of sends one behind the other, until the receiver says that it has the last."""
    byte = tensor[:1].clone()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STREAMED):
        if rank == 0:
            distributed.send(tensor, 1)
        else:
            distributed.recv(tensor, 0)
    if rank == 0:
        distributed.recv(byte, 1)
    else:
        distributed.send(byte, 0)
    torch.cuda.synchronize()
    return STREAMED * tensor.nbytes / (time.perf_counter() - began) / 1e9


def bare_nccl() -> dict[str, Any]:
    """torch.distributed by itself: there and back, halved."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    rounds = {size: repeats_of(size) for size in SIZES}
    processes = [context.Process(target=bare_nccl_rank, args=(rank, rounds, results)) for rank in range(2)]
    for process in processes:
        process.start()
    rows: dict[str, Any] = results.get(timeout=90)
    for process in processes:
        process.join(20)
        process.kill()
    return rows


class Calls:
    """One of two ranks that use NCCL's calls alone, in one stream: what a lane by NCCL can reach."""

    def __init__(self, rank: int, names: Any, registered: bool) -> None:
        torch.cuda.set_device(rank)
        torch.zeros(1, device="cuda")
        if rank == 0:
            name = new_id()
            names.put(name)
        else:
            name = names.get(timeout=60)
        self.rank = rank
        self._registered = registered
        self._communicator = Communicator(name, rank)
        self._communicator.open()
        self._stream = torch.cuda.Stream()
        self._seconds: list[float] = []

    def tensor(self, size: int) -> torch.Tensor:
        """A tensor to send or receive; `registered`: NCCL may copy from and to where it lies."""
        found = torch.ones(size, dtype=torch.uint8, device="cuda")
        if self._registered:
            handle = ctypes.c_void_p()
            register = _library().ncclCommRegister
            register.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)]
            error = register(self._communicator._handle, found.data_ptr(), size, ctypes.byref(handle))
            if error:
                raise RuntimeError(f"ncclCommRegister: {error}")
        torch.cuda.synchronize()
        return found

    def go(self, tensor: torch.Tensor, sender: int) -> None:
        """Let a tensor go from `sender` to the other."""
        call = self._communicator.send if self.rank == sender else self._communicator.receive
        began = time.perf_counter()
        call(tensor.data_ptr(), tensor.nbytes, self._stream.cuda_stream)
        self._seconds.append(time.perf_counter() - began)

    def row(self, size: int) -> dict[str, float]:
        ours, theirs, byte = self.tensor(size), self.tensor(size), self.tensor(1)
        seconds, streams = [], []
        self._seconds.clear()
        for _ in range(repeats_of(size)):
            torch.cuda.synchronize()
            began = time.perf_counter()
            for sender in (0, 1):
                self.go(ours if self.rank == sender else theirs, sender)
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / 2)
        found = {**spread("half_round_trip", seconds), **spread("call", self._seconds)}
        for _ in range(5 if size >= 2**24 else 0):
            began = time.perf_counter()
            for _ in range(STREAMED):
                self.go(ours, 0)
            self.go(byte, 1)
            torch.cuda.synchronize()
            streams.append(STREAMED * size / (time.perf_counter() - began) / 1e9)
        return found | ({"stream_gb_s": round(sorted(streams)[2], 1)} if streams else {})


def calls_rank(rank: int, names: Any, results: Any, registered: bool) -> None:
    try:
        calls = Calls(rank, names, registered)
        rows = {str(size): calls.row(size) for size in SIZES}
    except RuntimeError as error:
        rows = {"failed": str(error)}
    if rank == 0 or "failed" in rows:
        results.put(rows)
    time.sleep(1)  # the other one may still be at the last
    os._exit(0)


def calls(registered: bool) -> dict[str, Any]:
    """NCCL's calls by themselves, there and back, halved; `call` is what one takes of the processor."""
    context = torch.multiprocessing.get_context("spawn")
    names, results = context.Queue(), context.Queue()
    processes = [context.Process(target=calls_rank, args=(rank, names, results, registered)) for rank in range(2)]
    for process in processes:
        process.start()
    try:
        return dict(results.get(timeout=60))
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def peer_copy() -> dict[str, Any]:
    """One process that copies from GPU to GPU: the limit."""
    rows = {}
    for size in SIZES:
        source = torch.ones(size, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        seconds = []
        for _ in range(100):
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            began = time.perf_counter()
            target.copy_(source)
            torch.cuda.synchronize(0)
            torch.cuda.synchronize(1)
            seconds.append(time.perf_counter() - began)
        rows[str(size)] = spread("copy", seconds)
    return rows


def event_child(connection: Any) -> None:
    event = torch.cuda.Event(interprocess=True)
    event.record()
    handle = event.ipc_handle()
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000_000)  # 10 s
    event.record()
    connection.send(handle)
    time.sleep(60)


def events() -> dict[str, Any]:
    """Why words and not interprocess events: does a stream that waits for one go on after its recorder was killed?"""
    context = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=event_child, args=(theirs,), daemon=True)
    process.start()
    event = torch.cuda.Event.from_ipc_handle(torch.cuda.current_device(), ours.recv())
    stream = torch.cuda.Stream()
    torch.ones(1, device="cuda")
    event.wait(stream)
    with torch.cuda.stream(stream):
        torch.ones(1, device="cuda")
    time.sleep(0.5)
    before = stream.query()
    process.kill()
    process.join()
    until = time.perf_counter() + 5
    while not stream.query() and time.perf_counter() < until:
        time.sleep(0.01)
    return {"through_before_kill": before, "through_within_5_s_of_kill": stream.query()}
