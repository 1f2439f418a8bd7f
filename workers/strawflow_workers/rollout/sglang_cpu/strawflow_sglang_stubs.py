"""Stand-ins for the packages that SGLang imports unconditionally and that a host without CUDA cannot have.

1. Only an import statement in sglang's own modules sees a stub. Stubs never enter sys.modules, so every other
   library's probe (`import triton`, `find_spec("torchvision")`) still finds the package absent.
2. A package that is really installed wins over its stub.
3. Importing a stub, reading its attributes, subclassing and annotating with them works. Calling one raises
   `StubCalledError` with its full name; nothing passes silently.
4. The one exception is what decorates or declares a kernel when a module is read (`DECLARATIONS`): it takes the
   kernel's definition, and the kernel raises when launched.

Standard library only; this module does not know which SGLang modules the server loads.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

STUBBED_PACKAGES = ("sgl_kernel", "torchvision", "triton")

VERSIONS = {"triton": "3.0.0"}
"""What `package.__version__` says to modules that compare it while they are being imported."""

DECLARATIONS = {
    "triton.jit": "decorator",
    "triton.autotune": "decorator factory",
    "triton.heuristics": "decorator factory",
    "triton.Config": "value",
    "triton.language.constexpr": "value",
}
"""Names that may be called while a module is imported: they declare a kernel and run nothing."""


HIDDEN_PACKAGES = ("megatron",)
"""Installed here for the trainer; a debugging aid of sglang would load it into every server, seconds for nothing."""

ABSENT_MODULES = frozenset({"triton.knobs"})
"""Modules younger than the version the stub claims: importing one fails as it did there, and sglang copes with that."""


class StubCalledError(NotImplementedError):
    """A function of a package that is not installed here was called."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was called, but {name.partition('.')[0]} is not installed on this host: SGLang runs on the CPU with a "
            f"stub in its place. This option or model needs a CUDA host (or leave out the server flag that leads here)."
        )
        self.name = name


class StubBase:
    """What a class gets as its base when sglang derives it from a stubbed class; it cannot be instantiated."""

    def __new__(cls, *_: object, **__: object) -> NoReturn:
        raise StubCalledError(
            f"{getattr(cls, '_stub_base_name', 'a stubbed class')} (base of {cls.__qualname__})"
        )


class Stub:
    """An attribute of a stubbed module: it can be named, compared, annotated with and derived from, never called."""

    def __init__(self, name: str) -> None:
        self._stub_name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"{self._stub_name}.{name}")
        return _attribute(f"{self._stub_name}.{name}")

    def __call__(self, *_: object, **__: object) -> Any:
        raise StubCalledError(self._stub_name)

    def __getitem__(self, _: object) -> Any:
        raise StubCalledError(self._stub_name)

    def __mro_entries__(self, _: tuple[object, ...]) -> tuple[type, ...]:
        return (type("StubBase", (StubBase,), {"_stub_base_name": self._stub_name}),)

    def __instancecheck__(self, _: object) -> bool:
        return False  # nothing can be an instance of a class that cannot be instantiated

    def __subclasscheck__(self, _: type) -> bool:
        return False

    def __or__(self, other: object) -> Any:
        return other  # `Stub | None` in an annotation

    __ror__ = __or__

    def __repr__(self) -> str:
        return f"<stub of {self._stub_name}>"


class StubKernel(Stub):
    """A kernel definition taken by a stubbed decorator; `kernel[grid](...)`, `kernel(...)` and the like raise."""

    def __init__(self, name: str, definition: object) -> None:
        super().__init__(name)
        self.fn = definition
        self.__doc__ = getattr(definition, "__doc__", None)
        self.__name__ = getattr(definition, "__name__", name.rpartition(".")[2])
        self.__qualname__ = getattr(definition, "__qualname__", self.__name__)
        self.__module__ = getattr(definition, "__module__", __name__)


class StubValue(Stub):
    """A declared value (an autotune configuration, a compile-time constant); it only keeps its arguments."""

    def __init__(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        super().__init__(name)
        self.args = args
        self.kwargs = kwargs
        self.value = args[0] if args else None


class StubDeclaration(Stub):
    """One of `DECLARATIONS`."""

    def __call__(self, *args: object, **kwargs: object) -> Any:
        match DECLARATIONS[self._stub_name]:
            case "value":
                return StubValue(self._stub_name, args, kwargs)
            case "decorator" if args and not kwargs:
                return _declare(args[0])
            case _:
                return _declare


def _declare(definition: object) -> StubKernel:
    module = getattr(definition, "__module__", "?")
    return StubKernel(f"triton kernel {module}.{getattr(definition, '__qualname__', definition)}", definition)


def _attribute(full_name: str) -> Any:
    if full_name in DECLARATIONS:
        return StubDeclaration(full_name)
    if full_name.endswith("Error"):  # may stand in an except clause
        return type(full_name.rpartition(".")[2], (StubCalledError,), {})
    return Stub(full_name)


class StubModule(types.ModuleType):
    """A stubbed package or module; its attributes are stubs, made once when first asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(name, "Stub of a package that is not installed on this host.")
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        if name in VERSIONS:
            self.__version__ = VERSIONS[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"stub {self.__name__} has no {name}")
        value = _attribute(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class StubImporter:
    """Replacement of `builtins.__import__` that hands stubs to modules of sglang only."""

    def __init__(
        self,
        original: Callable[..., Any],
        packages: Sequence[str],
        importers: Sequence[str],
        hidden: Sequence[str],
    ) -> None:
        self._original = original
        self._packages = frozenset((*packages, *hidden))
        self._importers = frozenset(importers)
        self._hidden = frozenset(hidden)
        self._modules: dict[str, StubModule] = {}

    def __call__(
        self,
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        if level or name.partition(".")[0] not in self._packages or not self._is_ours(globals):
            return self._original(name, globals, locals, fromlist, level)
        module = self._module(name)
        return module if fromlist else self._modules[name.partition(".")[0]]

    def _is_ours(self, importing: Mapping[str, object] | None) -> bool:
        return importing is not None and str(importing.get("__name__")).partition(".")[0] in self._importers

    def _module(self, name: str) -> StubModule:
        if name in ABSENT_MODULES or name.partition(".")[0] in self._hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        if name not in self._modules:
            parent, _, last = name.rpartition(".")
            module = self._modules[name] = StubModule(name)
            if parent:
                setattr(self._module(parent), last, module)
        return self._modules[name]


def install(
    packages: Sequence[str] = STUBBED_PACKAGES, importers: Sequence[str] = ("sglang",)
) -> tuple[str, ...]:
    """Let modules of `importers` import stubs of those `packages` that are not installed; return their names."""
    absent = tuple(name for name in packages if importlib.machinery.PathFinder.find_spec(name) is None)
    builtins.__import__ = StubImporter(builtins.__import__, absent, importers, HIDDEN_PACKAGES)
    return absent
