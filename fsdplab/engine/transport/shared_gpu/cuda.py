"""The few calls of the CUDA driver that let processes share one GPU: memory by IPC, and words that streams write and
wait for.

torch has no interface for these, so they go to `libcuda` itself, which torch has loaded. Arenas come from the driver
and not from torch's allocator, whose expandable segments other processes cannot open. The words stay in host memory,
page-locked and mapped into the GPU. The versioned names (`_v2`) are those that the headers of CUDA 12 and 13 stand for.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdplab.engine.transport.shared_gpu.timelines import Timelines

_MAPPED = 1 | 2  # CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP
_LAZY_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: (int32)(word - value) >= 0
_FENCED = 0  # CU_STREAM_WRITE_VALUE_DEFAULT: everything before it is seen before it
_ADVICE = {
    1: "one of the arguments is wrong: please report it",
    2: "give a smaller model, or fewer ranks: they share the memory of one GPU",
    201: "no CUDA context: call torch.cuda.set_device first",
    801: (
        "this system does not offer it (CUDA IPC is missing in some containers and sandboxes): run one rank a GPU with"
        " nccl"
    ),
}
_address, _word, _size, _flags, _stream = (
    ctypes.c_uint64,
    ctypes.c_uint32,
    ctypes.c_size_t,
    ctypes.c_uint,
    ctypes.c_void_p,
)


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cuMemAlloc_v2": (ctypes.POINTER(_address), _size),
    "cuMemFree_v2": (_address,),
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _address),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_address), _Handle, _flags),
    "cuIpcCloseMemHandle": (_address,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, _size, _flags),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuMemHostGetDevicePointer_v2": (ctypes.POINTER(_address), ctypes.c_void_p, _flags),
    "cuStreamWriteValue32_v2": (_stream, _address, _word, _flags),
    "cuStreamWaitValue32_v2": (_stream, _address, _word, _flags),
    "cuGetErrorName": (ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)),
}


class Driver:
    """`libcuda`: `driver("cuMemFree_v2", address)` calls it and raises a `RuntimeError` that names the call if it
    fails.
    """

    def __init__(self, library: str = "libcuda.so.1") -> None:
        self._calls = {}
        loaded = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            call = self._calls[name] = getattr(loaded, name)
            call.argtypes, call.restype = arguments, ctypes.c_int

    def __call__(self, name: str, *arguments: Any) -> None:
        code = self._calls[name](*arguments)
        if code:
            told = ctypes.c_char_p()
            self._calls["cuGetErrorName"](code, ctypes.byref(told))
            word = (told.value or b"unknown").decode()
            raise RuntimeError(
                f"{name.removesuffix('_v2')} failed with {word} ({code});"
                f" {_ADVICE.get(code, 'look at the kernel log of the GPU driver')}"
            )


class CudaFabric:
    """Arenas on `device` that other processes open, and words that its streams write and wait for."""

    unseen = True  # a host that synchronises sleeps inside the driver

    def __init__(self, device: torch.device, driver: Driver | None = None) -> None:
        torch.zeros(1, device=device)  # makes the context current on this thread
        self._device, self._driver = device, driver or Driver()
        self._mapped: dict[int, int] = {}  # address of a page on the host -> on the device

    def adopt(self, timelines: Timelines) -> None:
        """Page-lock every rank's words and map them into the GPU, for as long as the timelines live."""
        for page in timelines.pages:
            self._mapped[page.data_ptr()] = self._map(page)
        weakref.finalize(timelines, self._forget, tuple(timelines.pages)).atexit = False

    def _map(self, page: torch.Tensor) -> int:
        """The device's address of host memory that begins at a page."""
        self._driver("cuMemHostRegister_v2", page.data_ptr(), -(-page.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, _MAPPED)
        found = _address()
        self._driver("cuMemHostGetDevicePointer_v2", ctypes.byref(found), page.data_ptr(), 0)
        return found.value

    def _forget(self, pages: Sequence[torch.Tensor]) -> None:
        for page in pages:
            del self._mapped[page.data_ptr()]
            self._driver("cuMemHostUnregister", page.data_ptr())

    def signal(self, timelines: Timelines, kind: int, number: int) -> None:
        """Queue the stores of this rank's words, one a reader."""
        for reader in range(timelines.ranks):
            self._write(self._at(timelines, timelines.rank, kind, reader), number)

    def wait(self, timelines: Timelines, rank: int, kind: int, number: int, check: Callable[[], None]) -> None:
        """Queue a wait; the host goes on."""
        self._await(self._at(timelines, rank, kind, timelines.rank), number)

    def _write(self, address: int, number: int) -> None:
        self._driver("cuStreamWriteValue32_v2", self._stream(), address, number % (1 << 32), _FENCED)

    def _await(self, address: int, number: int) -> None:
        self._driver("cuStreamWaitValue32_v2", self._stream(), address, number % (1 << 32), _AT_LEAST)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Memory of the driver's own, which IPC can export whole."""
        made = _address()
        self._driver("cuMemAlloc_v2", ctypes.byref(made), nbytes)
        return self._tensor(made.value, nbytes)

    def export(self, arena: torch.Tensor) -> bytes:
        """The IPC handle."""
        handle = _Handle()
        self._driver("cuIpcGetMemHandle", ctypes.byref(handle), arena.data_ptr())
        return bytes(handle.reserved)

    def open(self, process: int, told: bytes, nbytes: int) -> Callable[[], torch.Tensor]:
        """Map a peer's arena into this process."""
        made, handle = _address(), _Handle.from_buffer_copy(told[: ctypes.sizeof(_Handle)])
        self._driver("cuIpcOpenMemHandle_v2", ctypes.byref(made), handle, _LAZY_PEERS)
        arena = self._tensor(made.value, nbytes)
        return lambda: arena

    def close(self, opened: Callable[[], torch.Tensor]) -> None:
        """Unmap a peer's arena."""
        self._driver("cuIpcCloseMemHandle", opened().data_ptr())

    def free(self, arena: torch.Tensor) -> None:
        """Give an own arena back."""
        self._driver("cuMemFree_v2", arena.data_ptr())

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize(self._device)

    def _stream(self) -> int:
        return torch.cuda.current_stream(self._device).cuda_stream

    def _at(self, timelines: Timelines, rank: int, kind: int, reader: int) -> int:
        return self._mapped[timelines.pages[rank].data_ptr()] + timelines.offset(kind, reader)

    def _tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """Bytes that torch uses and does not own."""
        storage = torch._C._construct_storage_from_data_pointer(address, self._device, nbytes)
        return torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage, 0, (nbytes,), (1,))


def probe(device: torch.device, driver: Driver | None = None) -> None:
    """Try on this rank alone what `shared_gpu` needs; a `RuntimeError` says what this machine lacks.

    A stream writes a word in host memory and waits for it, and an arena is made, exported and given back. Whether
    another process may open it, only another process can try.
    """
    fabric = CudaFabric(device, driver)
    page = torch.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), dtype=torch.uint8)
    word = fabric._map(page)
    fabric._write(word, 7)
    fabric._await(word, 7)
    fabric.synchronize()
    if (seen := int(page.view(torch.int32)[0])) != 7:
        raise RuntimeError(
            f"a stream wrote 7 into host memory, and the host reads {seen}: this machine does not keep them coherent;"
            " use nccl, one rank a GPU"
        )
    fabric._driver("cuMemHostUnregister", page.data_ptr())
    arena = fabric.allocate(2 << 20)
    fabric.export(arena)
    fabric.free(arena)
