"""Adapters for families of timm models, which name the stem, the blocks and the head."""
