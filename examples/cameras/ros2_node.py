"""A ROS 2 node that classifies the images of a topic through the peers. Not run on hardware.

    LS_EDGE_SECRET_KEY=laptop.key_secret python ros2_node.py --ros-args -p peers:=peers.yaml -p bundle:=bundle

It subscribes to `image` (sensor_msgs/Image) and publishes `class_name` (std_msgs/String).
"""

import os

import rclpy
from cv_bridge import CvBridge
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image
from std_msgs.msg import String

from ls_edge import RequestError, Source


class Classifier(Node):
    """Sends an image when the one before has its answer; images that arrive in between are dropped."""

    def __init__(self) -> None:
        super().__init__("ls_edge_classifier")
        peers = self.declare_parameter("peers", "peers.yaml").value
        bundle = self.declare_parameter("bundle", "bundle").value
        key = os.environ.get("LS_EDGE_SECRET_KEY")  # none if peers.yaml has no keys
        self.source = Source.open(peers, bundle, secret_key=key, budget_ms=500)
        self.bridge = CvBridge()
        self.waiting = None
        self.publisher = self.create_publisher(String, "class_name", 10)
        self.create_subscription(Image, "image", self.classify, qos_profile_sensor_data)
        self.create_timer(0.01, self.publish)  # rclpy is used by one thread; a future's callback runs on another

    def classify(self, message: Image) -> None:
        """Submit an image, unless one is in flight."""
        if self.waiting is None:
            self.waiting = self.source.submit(self.bridge.imgmsg_to_cv2(message, "rgb8"))

    def publish(self) -> None:
        """Publish the answer, if it is there."""
        if self.waiting is None or not self.waiting.done():
            return
        answered, self.waiting = self.waiting, None
        try:
            self.publisher.publish(String(data=answered.result().class_name))
        except RequestError as error:
            self.get_logger().warning(f"no answer: {error}")

    def destroy_node(self) -> None:
        """Close the source."""
        self.source.close()
        super().destroy_node()


def main() -> None:
    """Run the node until Ctrl-C."""
    rclpy.init()
    node = Classifier()
    try:
        rclpy.spin(node)
    finally:
        node.destroy_node()
        rclpy.shutdown()


if __name__ == "__main__":
    main()
