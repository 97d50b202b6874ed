"""Device memory with a file descriptor, and words that its streams write and wait for: calls of CUDA's driver.

Memory of `cuMemCreate` has a descriptor like a memfd: it lives until the last process that has it has let go of it,
however those before it have died. What `cudaMalloc` gives, and torch's allocator, belongs to one process, and reading
it elsewhere after that process has died is undefined.

`cuda.bindings` comes with every torch for CUDA since 2.10.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from omniflow.errors import DeviceError
from omniflow.transport.descriptors import close_all, duplicates
from omniflow.transport.device_pool import NUM_SLOTS, DeviceMemory

if TYPE_CHECKING:
    import torch

_WORDS_BYTES = NUM_SLOTS * 2 * 4
_OR_BEYOND = 0
"""CU_STREAM_WAIT_VALUE_GEQ"""


class Cuda:
    """One GPU of this process: its context, and what is asked of it. Raises DeviceError where there is none."""

    def __init__(self, index: int) -> None:
        try:
            import torch
        except ImportError:
            raise DeviceError("torch is not installed") from None
        if not torch.version.cuda:
            raise DeviceError("torch is built without CUDA")
        try:
            from cuda.bindings import driver
        except ImportError:
            raise DeviceError("cuda-bindings is not installed: pip install cuda-bindings") from None
        self.driver: Any = driver
        try:
            self.call(driver.cuInit, 0)
        except RuntimeError as error:  # there is no libcuda
            raise DeviceError(str(error)) from None
        self.index = index
        self._device = self.call(driver.cuDeviceGet, index)
        self._context = self.call(driver.cuDevicePrimaryCtxRetain, self._device)
        self.enter()
        self.uuid = bytes(self.call(driver.cuDeviceGetUuid, self._device).bytes).hex()
        self._idle: Any = None
        """A stream that is given nothing to do."""

    def call(self, function: Any, *arguments: Any) -> Any:
        """Call the driver. Raises DeviceError with the name of what failed, and how."""
        error, *values = function(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise DeviceError(f"{function.__name__} failed: {error.name}")
        return values[0] if values else None

    def enter(self) -> None:
        """Let this thread's calls go to this GPU."""
        self.call(self.driver.cuCtxSetCurrent, self._context)

    def look(self) -> None:
        """Raises DeviceError where this process's context is dead: the GPU does nothing of what it was given any more,
        and all later calls fail. From any thread, and also while another one captures a graph.
        """
        driver = self.driver
        self.call(driver.cuCtxPushCurrent, self._context)
        try:
            if self._idle is None:
                flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
                self._idle = self.call(driver.cuStreamCreate, flags.value)
            relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
            before = self.call(driver.cuThreadExchangeStreamCaptureMode, relaxed)
            try:
                self.call(driver.cuStreamQuery, self._idle)
            finally:
                self.call(driver.cuThreadExchangeStreamCaptureMode, before)
        finally:
            driver.cuCtxPopCurrent()

    def allocation(self) -> Any:
        """What is asked of `cuMemCreate`: memory on this GPU that has a descriptor."""
        driver = self.driver
        asked = driver.CUmemAllocationProp()
        asked.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        asked.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        asked.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        asked.location.id = self.index
        return asked

    def map(self, handle: Any, size: int) -> int:
        """Map memory into this process, for this GPU to read and write; gives its address. Lets go of `handle`."""
        driver = self.driver
        address = 0
        try:
            address = int(self.call(driver.cuMemAddressReserve, size, 0, 0, 0))
            self.call(driver.cuMemMap, address, size, 0, handle, 0)
            access = driver.CUmemAccessDesc()
            access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            access.location.id = self.index
            access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            self.call(driver.cuMemSetAccess, address, size, [access], 1)
        except DeviceError:
            if address:
                driver.cuMemUnmap(address, size)
                driver.cuMemAddressFree(address, size)
            raise
        finally:
            self.call(driver.cuMemRelease, handle)
        return address

    def unmap(self, address: int, size: int) -> None:
        """Take back what `map` gave."""
        self.call(self.driver.cuMemUnmap, address, size)
        self.call(self.driver.cuMemAddressFree, address, size)

    def let_go(self, address: int, size: int, words: npt.NDArray[np.uint8]) -> None:
        """Unmap memory once nothing on the GPU can still read there: unlike cudaFree, the driver does not wait."""
        self.enter()
        self.call(self.driver.cuCtxSynchronize)
        self.unmap(address, size)
        self.call(self.driver.cuMemHostUnregister, words.ctypes.data)


def has_bindings() -> bool:
    """Whether the driver can be called from Python here."""
    try:
        import cuda.bindings.driver  # noqa: F401
    except ImportError:
        return False
    return True


@functools.cache
def cuda(index: int = 0) -> Cuda:
    """The GPU number `index` of those that this process sees."""
    return Cuda(index)


class _Range:
    """Lets torch make a tensor of a range of mapped memory; lives as long as the tensor's storage."""

    def __init__(self, memory: CudaMemory, address: int, length: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (length,), "typestr": "|u1", "data": (address, False), "version": 3, "stream": None
        }  # fmt: skip


class CudaMemory(DeviceMemory):
    """Device memory that is mapped into this process. It owns `descriptors`, of the memory and of the words, from the
    first: where it raises DeviceError they are closed, and nothing stays mapped.
    """

    def __init__(self, gpu: Cuda, handle: Any, size: int, device: str, descriptors: tuple[int, ...]) -> None:
        self.size_bytes = size
        self.device = device
        self.is_near = device == gpu.uuid
        """True where it lies on this process's own GPU: `view` is for that."""
        self._gpu = gpu
        self._descriptors = descriptors
        self._thread = 0
        self._stream = gpu.driver.CUstream(0)
        with contextlib.ExitStack() as unless_made:
            unless_made.callback(close_all, descriptors)
            self._address = gpu.map(handle, size)
            unless_made.callback(gpu.unmap, self._address, size)
            page = mmap.mmap(descriptors[1], _WORDS_BYTES)
            flat = np.frombuffer(page, np.uint8)
            self.words = memoryview(page).cast("I", (NUM_SLOTS, 2))
            flags = gpu.driver.CU_MEMHOSTREGISTER_DEVICEMAP | gpu.driver.CU_MEMHOSTREGISTER_PORTABLE
            gpu.call(gpu.driver.cuMemHostRegister, flat.ctypes.data, _WORDS_BYTES, flags)
            unless_made.callback(gpu.call, gpu.driver.cuMemHostUnregister, flat.ctypes.data)
            self._words_address = int(gpu.call(gpu.driver.cuMemHostGetDevicePointer, flat.ctypes.data, 0))
            unless_made.pop_all()
        # Waits for the GPU, so not in whichever thread lets go of the last view.
        arguments = (gpu, self._address, size, flat, descriptors)
        weakref.finalize(self, threading.Thread(target=_let_go, args=arguments, daemon=True).start).atexit = False

    def descriptors(self) -> tuple[int, ...]:
        return duplicates(self._descriptors)

    def view(self, offset: int, length: int) -> tuple[torch.Tensor, object]:
        import torch

        owner = _Range(self, self._address + offset, length)
        return torch.as_tensor(owner, device=f"cuda:{self._gpu.index}"), owner

    def copy_in(self, offset: int, tensor: torch.Tensor, num_bytes: int) -> None:
        self._ask("cuMemcpyDtoDAsync", self._address + offset, tensor.data_ptr(), num_bytes, self._stream)

    def copy_out(self, offset: int, length: int) -> torch.Tensor:
        """A copy of a range on this process's GPU, in the order of the stream."""
        import torch

        copy = torch.empty(length, dtype=torch.uint8, device=f"cuda:{self._gpu.index}")
        self._ask("cuMemcpyDtoDAsync", copy.data_ptr(), self._address + offset, length, self._stream)
        return copy

    def write(self, slot: int, word: int, value: int) -> None:
        self._ask("cuStreamWriteValue32", self._stream, self._words_address + 8 * slot + 4 * word, value, 0)

    def wait(self, slot: int, word: int, value: int) -> None:
        self._ask("cuStreamWaitValue32", self._stream, self._words_address + 8 * slot + 4 * word, value, _OR_BEYOND)

    def _ask(self, name: str, *arguments: Any) -> None:
        if self._thread != threading.get_ident():
            self._gpu.enter()
            self._thread = threading.get_ident()
        self._gpu.call(self._gpu.driver.__dict__[name], *arguments)


def _let_go(gpu: Cuda, address: int, size: int, words: npt.NDArray[np.uint8], descriptors: tuple[int, ...]) -> None:
    with contextlib.suppress(DeviceError):  # the context is dead, and with it the mapping
        gpu.let_go(address, size, words)
    close_all(descriptors)


def take_memory(size: int, index: int = 0) -> CudaMemory:
    """New memory of at least `size` bytes on a GPU, and its words. Raises DeviceError and OSError."""
    gpu = cuda(index)
    gpu.enter()
    driver, asked = gpu.driver, gpu.allocation()
    step = gpu.call(
        driver.cuMemGetAllocationGranularity,
        asked,
        driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    )
    size = -(-size // step) * step
    with contextlib.ExitStack() as unless_made:
        words = os.memfd_create("omniflow-words", os.MFD_CLOEXEC)
        unless_made.callback(os.close, words)
        os.ftruncate(words, _WORDS_BYTES)
        handle = gpu.call(driver.cuMemCreate, size, asked, 0)
        unless_made.callback(gpu.call, driver.cuMemRelease, handle)
        memory = int(gpu.call(driver.cuMemExportToShareableHandle, handle, asked.requestedHandleTypes, 0))
        unless_made.pop_all()
    return CudaMemory(gpu, handle, size, gpu.uuid, (memory, words))


def map_memory(memory: int, words: int, size: int, device: str, index: int = 0) -> CudaMemory:
    """Memory of another process, by its descriptors, which stay the caller's. Raises DeviceError and OSError."""
    gpu = cuda(index)
    gpu.enter()
    kind = gpu.driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    descriptors = duplicates((memory, words))
    try:
        handle = gpu.call(gpu.driver.cuMemImportFromShareableHandle, memory, kind)
    except DeviceError:
        close_all(descriptors)
        raise
    return CudaMemory(gpu, handle, size, device, descriptors)
