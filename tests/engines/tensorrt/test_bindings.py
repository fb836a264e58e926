"""The doubles of TensorRT, and the code that calls it, against the published bindings."""

import ast
import functools
import inspect
import json
import re
from pathlib import Path

import pytest

from ls_edge.engines.tensorrt import build as tensorrt_build
from ls_edge.engines.tensorrt import engine as tensorrt_engine

SIGNATURES = json.loads((Path(__file__).parents[2] / "doubles/signatures.json").read_text())


def _arguments(text):
    inside = text.split("(", 1)[1].rsplit(")", 1)[0]
    names = [part.split("=")[0].split(":")[0].split()[-1] for part in inside.split(", ") if part.strip()]
    return [name for name in names if name not in ("self", "/")]


@pytest.mark.parametrize("version", [version for version in SIGNATURES if version.startswith("tensorrt")])
def test_the_doubles_match_the_signatures_of_the_bindings(doubles, gpu, version):
    for name, texts in SIGNATURES[version].items():
        assert texts, f"{name} is not in {version}"
        double = doubles
        for part in name.split("."):
            double = getattr(double, part, None)
        if texts[0] in ("value", "property", "class") or double is None:
            continue
        call = double.__init__ if inspect.isclass(double) else double
        ours = [p for p in inspect.signature(call).parameters if p != "self"]
        assert ours in [_arguments(text) for text in texts], (name, ours, texts)


_OBJECTS = {
    "trt": "", "_trt": "", "builder": "Builder", "network": "INetworkDefinition", "parser": "OnnxParser",
    "config": "IBuilderConfig", "profile": "IOptimizationProfile", "_runtime": "Runtime", "_engine": "ICudaEngine",
    "engine": "ICudaEngine", "_context": "IExecutionContext", "context": "IExecutionContext",
    "_rtx_config": "IRuntimeConfig", "runtime_config": "IRuntimeConfig", "runtime_cache": "IRuntimeCache",
}  # fmt: skip
_ONLY_RTX = re.compile(
    r"BuilderFlag.REQUIRE_USER_ALLOCATION|IBuilderConfig.set_flag|I?Runtime(Config|Cache)\b|DynamicShapes|"
    r"ICudaEngine.create_runtime_config"
)


def _used(module):
    """Dotted names that a module reads of the objects of TensorRT, by the names that it gives them."""
    found = set()
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        parts, inner = [node.attr], node.value
        while isinstance(inner, ast.Attribute) and inner.attr not in _OBJECTS:
            parts.insert(0, inner.attr)
            inner = inner.value
        name = inner.id if isinstance(inner, ast.Name) else inner.attr if isinstance(inner, ast.Attribute) else None
        if name in _OBJECTS:
            found.add(".".join(filter(None, (_OBJECTS[name], *parts))))
    prefixes = {name.rsplit(".", 1)[0] for name in found}
    return {name.removesuffix(".__init__") for name in found if name not in prefixes and not name.startswith("__")}


@pytest.mark.parametrize("module", [tensorrt_build, tensorrt_engine], ids=lambda m: m.__name__.split(".")[-1])
def test_every_name_of_tensorrt_is_in_all_bindings_and_in_the_double(module, doubles):
    used = _used(module)
    assert len(used) > 5
    versions = [version for version in SIGNATURES if version.startswith("tensorrt")]
    assert {version.split()[1].split(".")[0] for version in versions} == {"10", "11"}
    for name in used:
        for version in versions if not _ONLY_RTX.match(name) else ():
            assert SIGNATURES[version].get(name), f"{name} is not in {version}"


@pytest.mark.parametrize("module", [tensorrt_build, tensorrt_engine], ids=lambda m: m.__name__.split(".")[-1])
def test_every_name_is_in_tensorrt_for_rtx(module):
    rtx = pytest.importorskip("tensorrt_rtx_bindings", reason="TensorRT for RTX is not installed; use the extra dev")
    for name in _used(module):
        functools.reduce(getattr, name.split("."), rtx)
