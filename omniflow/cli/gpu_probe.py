"""Tries whether processes can hand each other GPU memory here: two processes do it, as hosts would.

python -m omniflow.cli.gpu_probe write|read DESCRIPTOR
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

from omniflow.errors import DeviceError
from omniflow.transport.cuda_driver import map_memory, take_memory
from omniflow.transport.device_pool import FILLED

_SIZE = 2**21
_BYTE = 7
_WORKS = "works"
_PATIENCE_S = 60
"""Two processes import torch and open a GPU: 5-20 s."""


def try_sharing(source: str, target: str) -> str | None:
    """Let a process on GPU `source` (as CUDA_VISIBLE_DEVICES names it) hand memory to one on GPU `target`.

    Gives why that does not work; None where it does. Nothing of CUDA is touched in this process.
    """
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    programs = [
        subprocess.Popen(
            [sys.executable, "-m", "omniflow.cli.gpu_probe", what, str(end.fileno())],
            pass_fds=[end.fileno()],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for what, gpu, end in zip(("write", "read"), (source, target), ends, strict=True)
    ]
    for end in ends:
        end.close()
    said = []
    for program in programs:
        try:
            said.append(program.communicate(timeout=_PATIENCE_S)[0].strip())
        except subprocess.TimeoutExpired:
            said.append(f"no answer within {_PATIENCE_S} s")
            for each in programs:
                each.kill()
    if said[1].endswith(_WORKS):
        return None
    found = next((text for text in said if text), "a process ended without a word")
    return found.splitlines()[-1]


def _write(link: socket.socket) -> None:
    memory = take_memory(_SIZE)
    memory.view(0, _SIZE)[0].fill_(_BYTE)
    memory.write(0, FILLED, 1)
    socket.send_fds(link, [f"{memory.size_bytes} {memory.device}".encode()], list(memory.descriptors()))
    link.recv(1)


def _read(link: socket.socket) -> None:
    message, descriptors, _flags, _address = socket.recv_fds(link, 200, 2)
    if len(descriptors) != 2:
        return  # the writer has failed, and says why itself
    size, device = message.decode().split()
    memory = map_memory(descriptors[0], descriptors[1], int(size), device)
    memory.wait(0, FILLED, 1)
    got = memory.view(0, _SIZE)[0] if memory.is_near else memory.copy_out(0, _SIZE)
    total = int(got.long().sum())
    print(_WORKS if total == _BYTE * _SIZE else f"{total} arrived instead of {_BYTE * _SIZE}")  # noqa: T201


def main() -> None:
    """One of the two processes."""
    try:
        {"write": _write, "read": _read}[sys.argv[1]](socket.socket(fileno=int(sys.argv[2])))
    except (DeviceError, RuntimeError) as error:
        print(str(error).splitlines()[0])  # noqa: T201


if __name__ == "__main__":
    main()
