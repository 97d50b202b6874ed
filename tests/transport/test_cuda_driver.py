"""What is asked of CUDA's driver, in which order, and what is given back where it refuses. A driver that counts takes
its place: no machine of these tests has GPUs. That it works with the real one is tested by tests/test_gpu_hosts.py.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from omniflow.errors import DeviceError
from omniflow.transport import cuda_driver
from omniflow.transport.cuda_driver import map_memory, take_memory
from tests.files import few_files
from tests.waiting import HANGS_S

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.usefixtures("nothing_left")

SIZE, GRANULE, ADDRESS = 1000, 2**21, 0x7000_0000_0000


class Result:
    def __init__(self, name: str) -> None:
        self.name = name


class Driver(ModuleType):
    """Writes down its calls as (name, arguments, thread); `refuses` is the function that fails."""

    CUresult = SimpleNamespace(CUDA_SUCCESS=Result("CUDA_SUCCESS"))
    CUmemAllocationProp = staticmethod(lambda: SimpleNamespace(location=SimpleNamespace()))
    CUmemAccessDesc = CUmemAllocationProp
    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemAllocationHandleType = SimpleNamespace(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=SimpleNamespace(value=1))
    CUstreamCaptureMode = SimpleNamespace(CU_STREAM_CAPTURE_MODE_RELAXED="relaxed")
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUstream = staticmethod(lambda number: number)
    GIVES: dict[str, Callable[[], Any]] = {
        "cuDeviceGet": lambda: 0,
        "cuDevicePrimaryCtxRetain": lambda: "context",
        "cuDeviceGetUuid": lambda: SimpleNamespace(bytes=b"uuid"),
        "cuMemGetAllocationGranularity": lambda: GRANULE,
        "cuMemCreate": lambda: "handle",
        "cuMemImportFromShareableHandle": lambda: "their handle",
        "cuMemExportToShareableHandle": lambda: os.memfd_create("test-device"),
        "cuMemAddressReserve": lambda: ADDRESS,
        "cuMemHostGetDevicePointer": lambda: 0x1000,
        "cuStreamCreate": lambda: "a stream",
        "cuThreadExchangeStreamCaptureMode": lambda: "global",
    }
    CALLS = (
        *("cuInit", "cuCtxSetCurrent", "cuCtxSynchronize", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"),
        *("cuMemAddressFree", "cuMemRelease", "cuMemHostRegister", "cuMemHostUnregister", "cuMemcpyDtoDAsync"),
        *("cuStreamWriteValue32", "cuStreamWaitValue32", "cuStreamQuery", *GIVES),
        *("cuCtxPushCurrent", "cuCtxPopCurrent"),
    )

    def __init__(self) -> None:
        super().__init__("driver")
        self.calls: list[tuple[str, tuple[Any, ...], int]] = []
        self.refuses = ""
        self.let_go = threading.Event()
        """Set once the thread that lets go of memory is through."""
        for name in self.CALLS:
            vars(self)[name] = self._function(name)

    def _function(self, name: str) -> Callable[..., tuple[Any, ...]]:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, arguments, threading.get_ident()))
            if name == self.refuses:
                return (Result("CUDA_ERROR_NOT_SUPPORTED"),)
            return self.CUresult.CUDA_SUCCESS, *([self.GIVES[name]()] if name in self.GIVES else [])

        call.__name__ = name
        return call

    def names(self) -> list[str]:
        return [name for name, _, _ in self.calls]

    def told(self, *names: str) -> list[str]:
        """In the order in which they were called."""
        return [name for name in self.names() if name in names]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    found = Driver()
    bindings = ModuleType("cuda.bindings")
    vars(bindings)["driver"] = found
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    gpu = cuda_driver.Cuda(0)
    monkeypatch.setattr(cuda_driver, "cuda", lambda index: gpu)
    give_back = cuda_driver._let_go

    def let_go(*arguments: Any) -> None:
        give_back(*arguments)
        found.let_go.set()

    monkeypatch.setattr(cuda_driver, "_let_go", let_go)
    found.calls.clear()
    return found


def test_memory_is_let_go_of_by_a_thread_once_the_gpu_is_through(driver: Driver) -> None:
    memory = take_memory(SIZE)
    assert (memory.size_bytes, memory.device, memory.is_near) == (GRANULE, b"uuid".hex(), True)
    assert driver.told("cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease") == [
        *("cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess", "cuMemRelease")
    ]
    driver.calls.clear()
    del memory
    assert driver.let_go.wait(HANGS_S)
    assert driver.names() == [
        *("cuCtxSetCurrent", "cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree", "cuMemHostUnregister")
    ]
    assert {thread for _, _, thread in driver.calls} != {threading.get_ident()}


def test_memory_of_a_context_that_is_dead_is_let_go_of_without_a_word(driver: Driver) -> None:
    """`nothing_left` counts its descriptors; an error in a thread would be printed, and set `let_go` never."""
    memory = take_memory(SIZE)
    driver.refuses = "cuCtxSynchronize"
    del memory
    assert driver.let_go.wait(HANGS_S)


def test_the_memory_of_another_process_is_mapped_for_this_gpu(driver: Driver) -> None:
    theirs, words = os.memfd_create("test-device"), os.memfd_create("test-words")
    os.ftruncate(words, cuda_driver._WORDS_BYTES)
    memory = map_memory(theirs, words, SIZE, "another GPU")
    os.close(theirs)
    os.close(words)
    assert not memory.is_near
    assert ("cuMemMap", (ADDRESS, SIZE, 0, "their handle", 0)) in [call[:2] for call in driver.calls]
    memory.words[3, 1] = 7
    assert memory.words[3, 1] == 7  # the page is another process's, too
    del memory
    assert driver.let_go.wait(HANGS_S)


def test_a_word_is_of_its_slot_and_each_thread_enters_the_context_once(driver: Driver) -> None:
    memory = take_memory(SIZE)
    driver.calls.clear()
    memory.write(2, 1, 9)
    memory.wait(2, 0, 9)
    thread = threading.Thread(target=memory.write, args=(0, 0, 1))
    thread.start()
    thread.join()
    asked = [(name, arguments) for name, arguments, _ in driver.calls]
    assert asked == [
        ("cuCtxSetCurrent", ("context",)),
        ("cuStreamWriteValue32", (0, 0x1000 + 20, 9, 0)),
        ("cuStreamWaitValue32", (0, 0x1000 + 16, 9, 0)),
        ("cuCtxSetCurrent", ("context",)),
        ("cuStreamWriteValue32", (0, 0x1000, 1, 0)),
    ]
    del memory
    assert driver.let_go.wait(HANGS_S)


@pytest.mark.parametrize(
    ("refuses", "given_back"),
    [
        ("cuMemCreate", []),
        ("cuMemExportToShareableHandle", ["cuMemRelease"]),
        ("cuMemAddressReserve", ["cuMemRelease"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]),
        ("cuMemHostRegister", ["cuMemRelease", "cuMemUnmap", "cuMemAddressFree"]),
        ("cuMemHostGetDevicePointer", ["cuMemRelease", "cuMemHostUnregister", "cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_what_a_driver_gave_before_it_refuses_is_given_back(
    driver: Driver, refuses: str, given_back: list[str]
) -> None:
    driver.refuses = refuses
    with pytest.raises(DeviceError, match=f"{refuses} failed: CUDA_ERROR_NOT_SUPPORTED"):
        take_memory(SIZE)
    assert driver.told("cuMemRelease", "cuMemUnmap", "cuMemAddressFree", "cuMemHostUnregister") == given_back


@pytest.mark.parametrize(("left", "given_back"), [(0, []), (1, ["cuMemRelease"])])
def test_a_process_that_may_open_no_more_files_takes_no_memory(
    driver: Driver, left: int, given_back: list[str]
) -> None:
    with few_files(left), pytest.raises(OSError, match="Too many open files"):
        take_memory(SIZE)
    assert driver.told("cuMemRelease", "cuMemUnmap") == given_back


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_process_that_may_open_no_more_files_maps_no_memory(driver: Driver, left: int) -> None:
    driver.refuses = "cuMemImportFromShareableHandle" if left == 2 else ""
    words = os.memfd_create("test-words")
    with few_files(left), pytest.raises((OSError, DeviceError)):
        map_memory(words, words, SIZE, "another GPU")
    os.close(words)
    assert driver.told("cuMemMap") == []


def test_memory_that_cannot_be_mapped_leaves_no_descriptor(driver: Driver) -> None:
    """As that of a GPU that this one does not reach; `nothing_left` counts them."""
    driver.refuses = "cuMemSetAccess"
    words = os.memfd_create("test-words")
    with pytest.raises(DeviceError):
        map_memory(words, words, SIZE, "another GPU")
    os.close(words)


def test_a_look_at_the_gpu_leaves_the_thread_as_it_was(driver: Driver) -> None:
    gpu = cuda_driver.cuda(0)
    for _ in range(2):
        gpu.look()
    for driver.refuses in ("cuStreamQuery", "cuCtxPushCurrent"):
        with pytest.raises(DeviceError, match=f"{driver.refuses} failed"):
            gpu.look()
    assert driver.told("cuStreamCreate") == ["cuStreamCreate"]
    modes = [arguments for name, arguments, _ in driver.calls if name == "cuThreadExchangeStreamCaptureMode"]
    assert modes == [("relaxed",), ("global",)] * 3
    assert driver.told("cuCtxPushCurrent", "cuCtxPopCurrent") == [
        *("cuCtxPushCurrent", "cuCtxPopCurrent") * 3,
        "cuCtxPushCurrent",
    ]
