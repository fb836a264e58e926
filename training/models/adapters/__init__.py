"""One adapter for each family of timm models, which names its stem, blocks and head."""
