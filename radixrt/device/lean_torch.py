"""Imports torch without the parts that compile, export and train models, in two thirds of the time
and with 28 MB less memory.

A worker with a small model takes as long to import torch as to load the model. These parts are a
third of it, and nothing here computes with them. Each is a module that runs when one of its
attributes is asked for. Torch imports some of them for their registrations alone, which
``torch.compile``, FakeTensor and the shapes of ``device="meta"`` use; these are then not there.
"""

import importlib.metadata
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from radixrt.device.host_memory import has_gpu

_TRIED = ("2.13.",)
"""Versions of torch whose import is known to work so; others are imported whole."""
_POSTPONED = frozenset({
    "torch._decomp", "torch._export", "torch._meta_registrations", "torch._refs", "torch.ao",
    "torch.distributed.rpc", "torch.distributions", "torch.export", "torch.masked", "torch.nn.intrinsic",
    "torch.nn.qat", "torch.nn.quantizable", "torch.nn.quantized", "torch.optim", "torch.package", "torch.profiler",
    "torch.quantization", "torch.testing", "torch.utils.data",
})  # fmt: skip


def postpone_unused_parts() -> None:
    """Call before the first import of torch. On a machine with a GPU it does nothing: Triton and
    FlashInfer use these parts."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if version.startswith(_TRIED) and not has_gpu() and "torch" not in sys.modules:
        sys.meta_path.insert(0, _Finder())


_postponed: "list[_Postponed]" = []
"""In the order in which torch asked for them."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _POSTPONED:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Postponing(spec.loader)
        return spec


class _Postponing(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _Postponed(spec.name)
        _postponed.append(module)
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass  # at the first use


class _Postponed(ModuleType):
    """A module that has not run. Unlike ``importlib.util.LazyLoader``'s, it is not run by a second
    import."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system looks for some
            raise AttributeError(name)
        torch = sys.modules["torch"].__spec__
        if not getattr(torch, "_initializing", False):
            # In the order of torch itself: they import each other, and not in any order.
            for module in list(_postponed):
                _run(module)
        _run(self)
        return getattr(self, name)


def _run(module: _Postponed) -> None:
    """Run a module, unless it has run."""
    spec = module.__spec__
    if module in _postponed and spec is not None and isinstance(spec.loader, _Postponing):
        _postponed.remove(module)
        module.__class__ = ModuleType  # type: ignore[assignment]
        spec.loader.loader.exec_module(module)
