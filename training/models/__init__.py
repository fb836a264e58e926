"""timm models seen as stem, blocks and head."""
