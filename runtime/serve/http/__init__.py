"""HTTP without images: connections, requests, and their limits."""
