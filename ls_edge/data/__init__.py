"""Images: folders and archives of class folders, named data sets, decoding and normalization."""
