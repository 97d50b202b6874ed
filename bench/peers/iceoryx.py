"""iceoryx2: publish-subscribe of byte slices, woken by an iceoryx2 event."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import iceoryx2 as iox
import numpy as np

from bench.peers.pair import Channel, run


class Iceoryx(Channel):
    name = "iceoryx2"

    def prepare(self) -> None:
        self.key = f"omniflow-bench-{os.getpid()}"

    def _open(self, out: str, into: str) -> None:
        iox.set_log_level(iox.LogLevel.Error)
        self.node = iox.NodeBuilder.new().create(iox.ServiceType.Ipc)
        out_data, out_event = self._service(out), self._event(out)
        in_data, in_event = self._service(into), self._event(into)
        self.subscriber = in_data.subscriber_builder().buffer_size(64).create()
        self.publisher = (
            out_data.publisher_builder()
            .initial_max_slice_len(1 << 16)
            .allocation_strategy(iox.AllocationStrategy.PowerOfTwo)
            .backpressure_strategy(iox.BackpressureStrategy.RetryUntilDelivered)
            .create()
        )
        self.notifier = out_event.notifier_builder().create()
        self.listener = in_event.listener_builder().create()
        self.held: Any = None

    def _service(self, name: str) -> Any:
        builder = self.node.service_builder(iox.ServiceName.new(self.key + name))
        service = builder.publish_subscribe(iox.Slice[ctypes.c_uint8])
        return service.enable_safe_overflow(False).subscriber_max_buffer_size(64).history_size(0).open_or_create()

    def _event(self, name: str) -> Any:
        return self.node.service_builder(iox.ServiceName.new(f"{self.key}e{name}")).event().open_or_create()

    def parent(self) -> None:
        self._open("o", "i")

    def child(self) -> None:
        time.sleep(1)  # a sample that is published before the other side subscribes is lost
        self._open("i", "o")

    def _send(self, source: Any, size: int) -> None:
        sample = self.publisher.loan_slice_uninit(size)
        ctypes.memmove(sample.payload().as_ptr(), source, size)
        sample.assume_init().send()
        self.notifier.notify()

    def _receive(self) -> Any:
        while True:
            sample = self.subscriber.receive()
            if sample is not None:
                return sample
            self.listener.blocking_wait()

    def send(self, data: bytes) -> None:
        self._send(bytes(data), len(data))

    def receive(self) -> bytes:
        sample = self._receive()
        slice_ = sample.payload()
        data = ctypes.string_at(slice_.as_ptr(), slice_.len())
        sample.delete()
        return data

    def send_array(self, array: np.ndarray) -> None:
        self._send(array.ctypes.data, array.nbytes)

    def receive_array(self) -> np.ndarray:
        self.held = self._receive()
        slice_ = self.held.payload()
        pointer = slice_.as_ptr()
        address = pointer if isinstance(pointer, int) else ctypes.cast(pointer, ctypes.c_void_p).value
        return np.frombuffer((ctypes.c_uint8 * slice_.len()).from_address(address), np.uint8)

    def release(self) -> None:
        self.held.delete()


if __name__ == "__main__":
    run(Iceoryx())
