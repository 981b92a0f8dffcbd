"""OutputStreamer: the library's own output path, from packed steps to frames."""
