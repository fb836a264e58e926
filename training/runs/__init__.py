"""Run folders: written, read, published, and used as initial weights or as a teacher."""
