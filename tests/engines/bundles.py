"""Copies of bundles with other files."""

import hashlib
import shutil

import msgspec
import onnx

from ls_edge.core.bundle import Bundle, bundle_id_of, write_manifest


def edited(bundle, folder, edit):
    """Copy a bundle and apply ``edit(index, model)`` to each block; the copy is a valid bundle of the same model."""
    shutil.copytree(bundle.folder, folder)
    manifest = bundle.manifest
    blocks = []
    for index, part in enumerate(manifest.parts.blocks):
        model = onnx.load_model_from_string(bundle.read(f"block {index}"))
        edit(index, model)
        raw = model.SerializeToString()
        (folder / part.file).write_bytes(raw)
        blocks.append(msgspec.structs.replace(part, sha256=hashlib.sha256(raw).hexdigest(), bytes=len(raw)))
    parts = msgspec.structs.replace(manifest.parts, blocks=tuple(blocks))
    changed = bundle_id_of(bundle.interface, manifest.precision, parts)
    verified = {key: value for key, value in manifest.verified.items() if key != "outputs"}
    write_manifest(folder, msgspec.structs.replace(manifest, parts=parts, bundle_id=changed, verified=verified))
    return Bundle.open(folder)
