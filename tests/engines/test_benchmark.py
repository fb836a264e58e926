"""The document of ``ls-edge bench``: its keys with and without a monolith."""

import json

import msgspec
import pytest

from ls_edge.core.bundle import Bundle
from ls_edge.core.errors import EngineError, UsageError
from ls_edge.engines.benchmark import bench
from ls_edge.engines.engine import signature_of
from ls_edge.engines.onnxruntime import OnnxEngine
from ls_edge.engines.reference import REFERENCE_VALUES, check_engine
from ls_edge.export.merge import merge


@pytest.fixture(scope="module")
def whole(bundle):
    blocks = [bundle.read(f"block {index}") for index in range(bundle.num_blocks)]
    return merge(bundle.read("stem"), blocks, bundle.read("head"))


def document(result):
    return json.loads(msgspec.json.encode(result))


def test_chain_and_monolith_are_timed_and_compared(bundle, whole):
    found = document(bench(bundle, threads=1, batch=2, duration=0.05, monolith=(whole, "merged")))
    assert found["bundle_id"] == bundle.manifest.bundle_id
    assert (found["threads"], found["batch"], found["monolith"], found["monolith_reason"]) == (1, 2, "merged", None)
    assert len(found["blocks_ms"]) == 6
    times = [found[key] for key in ("stem_ms", "head_ms", "chain_ms", "monolith_ms", "monolith_default_ms")]
    for entry in (*times, *found["blocks_ms"]):
        assert 0 < entry["min"] <= entry["p50"] <= entry["p95"]
    assert found["chain_over_monolith"] == pytest.approx(
        found["chain_ms"]["p50"] / found["monolith_ms"]["p50"], abs=1e-3
    )
    assert found["repeats"] >= 3


def test_the_monolith_is_compared_with_the_chain(bundle, whole):
    signature = signature_of(bundle.manifest, "whole")
    engine = OnnxEngine(whole, "whole", signature, provider="CPUExecutionProvider", threads=1)
    check_engine(bundle, engine)
    other = msgspec.structs.replace(bundle.manifest, verified={"outputs": {"chain": [1.0] * REFERENCE_VALUES}})
    with pytest.raises(EngineError, match=r"^whole computes wrong values"):
        check_engine(Bundle(bundle.folder, other), engine)


def test_without_a_monolith_the_reason_is_reported(bundle):
    found = document(bench(bundle, threads=1, duration=0.02, monolith=(None, "no onnx here")))
    assert found["monolith_ms"] is found["chain_over_monolith"] is found["monolith_default_ms"] is None
    assert found["monolith_reason"] == "no onnx here"
    assert found["chain_ms"]["p50"] > 0


def test_invalid_arguments_and_files_are_refused(bundle, whole):
    for wrong in ({"batch": 0}, {"duration": 0.0}, {"duration": float("nan")}, {"threads": 0}):
        with pytest.raises(UsageError):
            bench(bundle, **{"threads": 1, "duration": 0.02, **wrong})
    with pytest.raises(EngineError, match=r"^whole does not load"):
        bench(bundle, threads=1, duration=0.02, monolith=(whole[:1000], "broken"))
