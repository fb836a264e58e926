"""An adapter for each family of timm models: what its stem, blocks and head are."""
