"""Every file of a corpus gets the same logits through every way into the model, with real processes."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from ls_edge.core.bundle import Bundle, ImageSpec
from ls_edge.data.decoding import decode
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline
from ls_edge.runtime.fleet.local_cluster import LocalCluster
from ls_edge.runtime.source.source import Source
from tests.data.corpus import corpus
from tests.runtime.serve.serving import Server


def v2(server, name, shape, datatype, data):
    body = {"inputs": [{"name": name, "shape": shape, "datatype": datatype, "data": data}]}
    status, _, reply = server.ask("POST", "/v2/models/tiny/infer", json.dumps(body).encode(), {})
    assert status == 200, reply
    (logits,) = [one["data"] for one in json.loads(reply)["outputs"] if one["name"] == "logits"]
    return logits


@pytest.mark.release
def test_every_file_gets_the_same_logits_on_every_way(tmp_path, make_bundle, ls_edge):
    spec = ImageSpec((16, 16), (0.5,) * 3, (0.5,) * 3, exif_orientation=True)
    folder = make_bundle(tmp_path / "bundle", image=spec)
    files = corpus()
    photos = tmp_path / "photos"
    photos.mkdir()
    with LocalCluster(tmp_path / "peers", folder, {"a": ["stem", 0, 1, 2, 3, "head"]}) as local:
        local.wait_warm()
        server, thin_server = Server(ls_edge, local.path, folder), Server(ls_edge, local.path, None)
        bundle = Bundle.open(folder)
        preprocess = Preprocessor(spec)
        with (
            Pipeline.open(bundle, threads=1) as chain,
            Source.open(local.path, folder) as full,
            Source.open(local.path) as thin,
        ):
            for source in (full, thin):
                assert source.wait_ready() == ()
            for number, (name, content) in enumerate(files.items()):
                path = photos / f"{number:03d}.{'png' if number % 2 else 'jpg'}"
                path.write_bytes(content)
                expected = chain.forward(preprocess(content)[None])[0]
                picture = Image.open(io.BytesIO(content))
                picture.load()
                pixels = np.asarray(decode(content, exif_orientation=True))
                text = base64.b64encode(content).decode()
                found = {
                    **{f"full {type(one).__name__}": full.submit(one) for one in (content, path, picture)},
                    **{f"thin {type(one).__name__}": thin.submit(one) for one in (content, path, picture, pixels)},
                    "full 1-D": full.submit(np.frombuffer(content, np.uint8)),
                    "thin 1-D": thin.submit(np.frombuffer(content, np.uint8)),
                }
                logits = {way: future.result(20).logits for way, future in found.items()}
                for place, one in (("served", server), ("served thin", thin_server)):
                    logits[place] = one.predict(content, "?logits=1")[1]["logits"]
                    logits[f"{place} V2 image"] = v2(one, "image", [1], "BYTES", [text])
                    logits[f"{place} V2 pixels"] = v2(
                        one, "pixels", [1, *pixels.shape], "UINT8", pixels.ravel().tolist()
                    )
                logits["served V2 input"] = v2(
                    server, "input", [1, 3, 16, 16], "FP32", preprocess(content).ravel().tolist()
                )
                for way, values in logits.items():
                    assert np.allclose(values, expected, atol=1e-4), f"{name}: {way}"
        done = [
            ls_edge.run("predict", *more, photos, "--json", "--top", 1).stdout
            for more in (("--bundle", folder), ("--bundle", folder, "--peers", local.path), ("--peers", local.path))
        ]
    labels = [[(json.loads(line)["image"], json.loads(line)["top"]) for line in one.splitlines()] for one in done]
    assert len(labels[0]) == len(files)
    for one in labels[1:]:
        for (image, (first,)), (other_image, (second,)) in zip(labels[0], one, strict=True):
            assert (image, first["label"]) == (other_image, second["label"])
            assert first["probability"] == pytest.approx(second["probability"], abs=1e-4)
