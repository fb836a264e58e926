"""FastAPI service of twenty lines that ``goodput`` compares with, with the same preprocessing and the same engines.

``uvicorn benchmarks.fastapi_service:app --workers 2``: each worker runs all blocks on one thread. ``BUNDLE`` is the
path of the bundle, ``LEAST_S`` the least time of an image in the engines.
"""

import os
import threading
import time

import numpy as np
from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool

from ls_edge.core.bundle import Bundle
from ls_edge.data.preprocess import Preprocessor
from ls_edge.engines.pipeline import Pipeline

app = FastAPI()
bundle = Bundle.open(os.environ["BUNDLE"])
preprocess, engines, lock = Preprocessor(bundle.manifest.image), Pipeline.open(bundle, threads=1), threading.Lock()


def classify(image: bytes) -> dict[str, str]:
    pixels = preprocess(image)[np.newaxis]
    with lock:
        time.sleep(float(os.environ["LEAST_S"]))
        logits = engines.forward(pixels)[0]
    return {"label": bundle.manifest.classes[int(logits.argmax())]}


@app.post("/predict")
async def predict(request: Request) -> dict[str, str]:
    return await run_in_threadpool(classify, await request.body())
