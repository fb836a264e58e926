"""Classify the frames of a Jetson's CSI camera through the peers. Not run on hardware.

JetPack's OpenCV is built with GStreamer; the wheel opencv-python-headless is not, so do not install it here.

    LS_EDGE_SECRET_KEY=laptop.key_secret python jetson_gstreamer.py peers.yaml bundle
"""

import os
import sys

import cv2

from ls_edge import RequestError, Source

# The image processor scales and converts; `drop` and `max-buffers` keep the newest frame only.
PIPELINE = (
    "nvarguscamerasrc sensor-id=0 ! video/x-raw(memory:NVMM), width=1280, height=720, framerate=30/1 ! "
    "nvvidconv ! video/x-raw, width=640, height=360, format=BGRx ! "
    "videoconvert ! video/x-raw, format=BGR ! appsink drop=true max-buffers=1 sync=false"
)


def main(peers: str, bundle: str) -> None:
    """Print the class of each frame until Ctrl-C."""
    camera = cv2.VideoCapture(PIPELINE, cv2.CAP_GSTREAMER)
    if not camera.isOpened():
        sys.exit("cannot open the camera; check cv2.getBuildInformation() for GStreamer, and the cable")
    key = os.environ.get("LS_EDGE_SECRET_KEY")  # none if peers.yaml has no keys
    with Source.open(peers, bundle, secret_key=key, budget_ms=500) as source:
        source.wait_ready()
        while True:
            there, frame = camera.read()
            if not there:
                sys.exit("the camera gives no more frames; check its cable")
            try:
                answer = source.submit(frame[:, :, ::-1]).result()
            except RequestError as error:
                print("no answer:", error)
            else:
                print(answer.class_name, f"{answer.latency_ms:.0f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
